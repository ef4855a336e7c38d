// weft doctor: what this machine offers, and what is in the way.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "weft/cli/command.h"
#include "weft/cli/flight_report.h"
#include "weft/cli/torch/commands.h"
#include "weft/core/error.h"
#include "weft/core/json.h"
#include "weft/core/system.h"
#include "weft/core/units.h"
#include "weft/launch/environment.h"

namespace weft::cli {
namespace {

double meminfo_bytes(const char* key) {
  const std::string value = value_behind("/proc/meminfo", key);
  return value.empty() ? 0 : std::stod(value) * 1024;
}

Json describe_cpu(Findings& findings) {
  const int64_t cores = usable_cores();
  const std::string flags = " " + value_behind("/proc/cpuinfo", "flags") + " ";
  Json features = Json::object();
  for (const char* name : {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
    features[name] = flags.find(fmt::format(" {} ", name)) != std::string::npos;
  if (!features["avx2"])
    findings.add("cpu", "has no AVX2: training is several times slower than it could be",
                 "use a machine from after 2013");

  std::ifstream limit("/sys/fs/cgroup/cpu.max");
  double quota = 0, period = 0;
  if (limit >> quota >> period && period > 0 && quota / period < cores) {
    findings.add("cpu",
                 fmt::format("{} cores are visible, but this container may use {:.2g}: threads will be throttled",
                             cores, quota / period),
                 "start at most that many ranks, with OMP_NUM_THREADS=1");
  }
  return {{"model", value_behind("/proc/cpuinfo", "model name")}, {"cores", cores}, {"features", features}};
}

Json describe_memory(Findings& findings) {
  const double total = meminfo_bytes("MemTotal"), available = meminfo_bytes("MemAvailable");
  std::ifstream file("/sys/fs/cgroup/memory.max");
  double limit = 0;
  if (!(file >> limit) || limit > total) limit = total;
  constexpr double kTight = 2.0 * (1 << 30);  // a rank of a small model with libtorch takes about 1 GB
  if (available < kTight)
    findings.add("memory", bytes_text(available) + " are available; two ranks of a small model need 2 GiB",
                 "end other programs");
  return {{"total_bytes", total}, {"available_bytes", available}, {"limit_bytes", limit}};
}

/// The local back end lives in memory without a name; /dev/shm is not used and only reported.
bool memfd_works(Findings& findings) {
  const int descriptor = ::memfd_create("weft-doctor", MFD_CLOEXEC);
  constexpr off_t kProbe = 1 << 20;
  const bool works = descriptor >= 0 && ::posix_fallocate(descriptor, 0, kProbe) == 0;
  if (descriptor >= 0) ::close(descriptor);
  if (!works) {
    findings.add("memfd", "memfd_create with fallocate fails: the local back end cannot work",
                 "allow memfd_create in the container's seccomp profile, or use layout.backend = \"gloo\"");
  }
  return works;
}

Json describe_limits(Findings& findings) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  constexpr rlim_t kFew = 1024;
  if (files.rlim_cur < kFew)
    findings.add("open files", fmt::format("the limit is {}; many ranks need more", files.rlim_cur), "ulimit -n 4096");
  struct statvfs shm {};
  const bool has_shm = ::statvfs("/dev/shm", &shm) == 0;
  return {{"open_files", files.rlim_cur},
          {"dev_shm_bytes", has_shm ? static_cast<double>(shm.f_blocks) * static_cast<double>(shm.f_frsize) : 0.0}};
}

int count_gpus() {
  int count = 0;
  while (std::filesystem::exists(fmt::format("/dev/nvidia{}", count))) ++count;
  return count;
}

Json describe_launcher(Findings& findings) {
  try {
    const launch::RankEnvironment env = launch::read_environment();
    if (!env.note.empty()) findings.add("launcher", env.note);
    return {{"source", launch::name(env.source)},
            {"rank", env.rank},
            {"size", env.size},
            {"local_rank", env.local_rank},
            {"local_size", env.local_size},
            {"master", env.size > 1 ? fmt::format("{}:{}", env.master_addr, env.master_port) : ""}};
  } catch (const ConfigError& error) {
    findings.add("launcher", error.what());
    return {{"source", "unusable"}};
  }
}

std::string yes_no(const Json& value) {
  return value.get<bool>() ? "yes" : "no";
}

void print_table(const Json& report) {
  const auto row = [](const char* what, const std::string& value) { fmt::print("{:<12} {}\n", what, value); };
  row("version", report["version"]);
  const Json& cpu = report["cpu"];
  row("cpu", fmt::format("{}, {} usable cores", cpu["model"].get<std::string>(), cpu["cores"].get<int>()));
  std::string features;
  for (const auto& [name, present] : cpu["features"].items())
    features += fmt::format("{}{} {}", features.empty() ? "" : ", ", name, yes_no(present));
  row("features", features);
  const Json& memory = report["memory"];
  row("memory", fmt::format("{} in all, {} available, limit {}", bytes_text(memory["total_bytes"]),
                            bytes_text(memory["available_bytes"]), bytes_text(memory["limit_bytes"])));
  const Json& limits = report["limits"];
  row("limits", fmt::format("{} open files, /dev/shm {}", limits["open_files"].get<int64_t>(),
                            bytes_text(limits["dev_shm_bytes"])));
  row("gpus", fmt::format("{}", report["gpus"].get<int>()));
  std::string backends;
  for (const auto& [name, usable] : report["backends"].items())
    backends += fmt::format("{}{} {}", backends.empty() ? "" : ", ", name, yes_no(usable));
  row("back ends", backends);
  const Json& launcher = report["launcher"];
  const bool ranked = launcher.contains("size") && launcher["size"] != 1;
  row("launcher",
      launcher["source"].get<std::string>() +
          (ranked ? fmt::format(", rank {} of {}", launcher["rank"].get<int>(), launcher["size"].get<int>()) : ""));
  for (const Json& finding : report["findings"]) {
    fmt::print("\n! {}: {}\n", finding["where"].get<std::string>(), finding["what"].get<std::string>());
    if (finding["remedy"] != "") fmt::print("  -> {}\n", finding["remedy"].get<std::string>());
  }
  if (report["findings"].empty()) fmt::print("\nNothing is in the way.\n");
}

void run_doctor(bool json) {
  Findings findings;
  Json report{{"version", version_text()}};
  report["cpu"] = describe_cpu(findings);
  report["memory"] = describe_memory(findings);
  report["limits"] = describe_limits(findings);
  report["gpus"] = count_gpus();
  const bool local = memfd_works(findings);
  report["backends"] = {{"local", local}, {"gloo", true}, {"nccl", false}};
  report["launcher"] = describe_launcher(findings);
  if (report["gpus"] > 0) findings.add("gpus", "are there, but this version of Weft trains on CPUs only");
  report["findings"] = Json::array();
  for (const Finding& finding : findings.items()) {
    report["findings"].push_back({{"where", finding.where}, {"what", finding.what}, {"remedy", finding.remedy}});
  }
  if (json) {
    fmt::print("{}\n", report.dump(2));
  } else {
    print_table(report);
  }
  if (!local) throw CLI::RuntimeError(static_cast<int>(ExitCode::config));
}

}  // namespace

void add_doctor(CLI::App& app) {
  auto json = std::make_shared<bool>(false);
  auto folder = std::make_shared<std::string>();
  CLI::App* doctor = app.add_subcommand("doctor", "Show what this machine offers, or who waits for whom in a job that hangs");
  doctor->add_option("FOLDER", *folder, "Folder of flight logs (weft run's log folder): which rank never came, and where");
  doctor->add_flag("--json", *json, "Print as JSON");
  doctor->footer(
      "Under a launcher it shows the rank's place: weft run -n 2 --tee all -- weft doctor\n\n"
      "Example:\n  weft doctor\n  kill -USR1 PID-OF-WEFT-RUN; weft doctor logs");
  doctor->callback([json, folder] {
    if (folder->empty()) return run_doctor(*json);
    const Json report = read_flight_logs(*folder);
    fmt::print("{}", *json ? report.dump(2) + "\n" : flight_report_text(report));
  });
}

}  // namespace weft::cli

#include "weft/launch/environment.h"

#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>

#include "weft/core/error.h"
#include "weft/core/philox.h"

extern char** environ;

namespace weft::launch {
namespace {

/// Takes numbers and texts out of the variables and notes what is wrong with them.
class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  bool has(const std::string& name) const { return !text(name).empty(); }

  std::string text(const std::string& name) const {
    const auto found = environment_.find(name);
    return found == environment_.end() ? "" : found->second;
  }

  /// The first of `names` that is set.
  std::string first_text(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (has(name)) return text(name);
    }
    return "";
  }

  std::optional<int> number(const std::string& name, int least, int most) {
    const std::string value = text(name);
    if (value.empty()) return std::nullopt;
    int result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error == std::errc() && end == value.data() + value.size() && result >= least && result <= most) return result;
    const std::string rule =
        most == kMost ? fmt::format("of at least {}", least) : fmt::format("from {} to {}", least, most);
    findings.add(name, fmt::format("'{}' is not a whole number {}", value, rule),
                 "let the launcher set it, or correct it");
    return std::nullopt;
  }

  int required(const std::string& name, int least, const std::string& because) {
    if (!has(name)) findings.add(name, "is not set", because);
    return number(name, least, kMost).value_or(least);
  }

  void below(const std::string& small, int value, const std::string& big, int limit) {
    if (value >= limit)
      findings.add(small, fmt::format("{} must be below {} = {}", value, big, limit), "the two contradict each other");
  }

  static constexpr int kMost = 1 << 24;  // ranks; far above any machine, far below overflow
  static constexpr int kMostPort = 65535;
  Findings findings;

 private:
  const Environment& environment_;
};

/// Ports for jobs whose launcher names none: below Linux's ephemeral range (from 32768), above most services.
int port_from(const std::string& run_id) {
  constexpr int kFirst = 20000, kCount = 10000;
  return kFirst + static_cast<int>(philox::stream_of(run_id) % kCount);
}

/// MASTER_ADDR and MASTER_PORT when set; else what follows from the job: `host` of rank 0 and a port by its name.
void take_master(Reader& reader, RankEnvironment& env, const std::string& host) {
  const bool one_node = env.local_size == env.size;
  if (reader.has("MASTER_ADDR")) {
    env.master_addr = reader.text("MASTER_ADDR");
  } else if (!one_node && host.empty()) {
    reader.findings.add("MASTER_ADDR", fmt::format("is not set, and the {} ranks stand on several nodes", env.size),
                        "set it to the host of rank 0, for instance mpirun -x MASTER_ADDR=node1");
  } else if (!one_node) {
    env.master_addr = host;
  }
  if (const auto port = reader.number("MASTER_PORT", 1, Reader::kMostPort)) {
    env.master_port = *port;
  } else if (env.size > 1) {
    env.master_port = port_from(env.run_id);
  }
}

RankEnvironment from_torchrun(Reader& reader) {
  RankEnvironment env{.source = Source::torchrun};
  env.rank = reader.required("RANK", 0, "WORLD_SIZE is; a rank needs both");
  env.size = reader.required("WORLD_SIZE", 1, "RANK is; a rank needs both");
  reader.below("RANK", env.rank, "WORLD_SIZE", env.size);
  const std::string master = reader.text("MASTER_ADDR");
  const bool here = master.empty() || master == "localhost" || master.starts_with("127.") || master == "::1";
  if (!here && !reader.has("LOCAL_WORLD_SIZE")) {
    reader.findings.add("LOCAL_WORLD_SIZE", fmt::format("is not set, and MASTER_ADDR = {} is another machine", master),
                        "set LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK as torchrun does");
  }
  env.local_size = reader.number("LOCAL_WORLD_SIZE", 1, Reader::kMost).value_or(env.size);
  env.local_rank = reader.number("LOCAL_RANK", 0, Reader::kMost)
                       .value_or(env.local_size == env.size ? env.rank : env.rank % env.local_size);
  reader.below("LOCAL_RANK", env.local_rank, "LOCAL_WORLD_SIZE", env.local_size);
  if (env.local_size > env.size) {
    reader.findings.add("LOCAL_WORLD_SIZE", fmt::format("{} exceeds WORLD_SIZE = {}", env.local_size, env.size),
                        "the two contradict each other");
  }
  const bool one_node = env.local_size == env.size;
  env.node = reader.number("GROUP_RANK", 0, Reader::kMost).value_or(one_node ? 0 : -1);
  env.nodes = reader.number("GROUP_WORLD_SIZE", 1, Reader::kMost).value_or(one_node ? 1 : -1);
  if (env.nodes > 0) reader.below("GROUP_RANK", env.node, "GROUP_WORLD_SIZE", env.nodes);
  env.run_id = reader.first_text({"WEFT_RUN_ID", "TORCHELASTIC_RUN_ID"});
  env.restart = reader.number("TORCHELASTIC_RESTART_COUNT", 0, Reader::kMost).value_or(0);
  take_master(reader, env, "");
  if (env.size > 1 && !reader.has("MASTER_PORT")) {
    reader.findings.add("MASTER_PORT", fmt::format("is not set, and there are {} ranks", env.size),
                        "set it to a free port of rank 0's host");
  }
  env.agent_store = reader.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  constexpr int kMostDescriptor = 1 << 20;  // Linux's default ceiling of RLIMIT_NOFILE
  if (env.rank == 0) env.listen_fd = reader.number("WEFT_MASTER_LISTEN_FD", 0, kMostDescriptor).value_or(-1);
  return env;
}

/// Two launchers of MPI programs name the same four numbers differently.
struct MpiNames {
  Source source;
  const char *rank, *size, *local_rank, *local_size;
};

RankEnvironment from_mpi(Reader& reader, const MpiNames& names, std::string run_id) {
  RankEnvironment env{.run_id = std::move(run_id), .source = names.source};
  env.rank = reader.required(names.rank, 0, fmt::format("{} is; a rank needs both", names.size));
  env.size = reader.required(names.size, 1, fmt::format("{} is; a rank needs both", names.rank));
  reader.below(names.rank, env.rank, names.size, env.size);
  env.local_rank = reader.required(names.local_rank, 0, "this launcher does not name the place on the node");
  env.local_size = reader.number(names.local_size, 1, Reader::kMost).value_or(env.size);
  reader.below(names.local_rank, env.local_rank, names.local_size, env.local_size);
  if (env.local_size > env.size) {
    reader.findings.add(names.local_size, fmt::format("{} exceeds {} = {}", env.local_size, names.size, env.size),
                        "the two contradict each other");
  }
  const bool one_node = env.local_size == env.size;
  env.node = one_node ? 0 : -1;
  env.nodes = one_node ? 1 : -1;
  take_master(reader, env, "");
  return env;
}

RankEnvironment from_open_mpi(Reader& reader) {
  return from_mpi(reader,
                  {Source::open_mpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                   "OMPI_COMM_WORLD_LOCAL_SIZE"},
                  reader.first_text({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}));
}

/// "pid-starttime" of the process that started this one: the same for all ranks that one proxy started on a node.
std::string parent_identity() {
  const pid_t parent = ::getppid();
  std::ifstream stat(fmt::format("/proc/{}/stat", parent));
  std::string line;
  std::getline(stat, line);
  // The name in brackets may hold anything; 20 fields behind it comes the start time in clock ticks (man 5 proc, field
  // 22).
  std::istringstream rest(line.substr(std::min(line.size(), line.rfind(')') + 1)));
  std::string field;
  for (int i = 0; i < 20; ++i) rest >> field;
  return fmt::format("{}-{}", parent, field);
}

RankEnvironment from_pmi(Reader& reader) {
  const std::string job = reader.text("PMI_JOBID");
  return from_mpi(reader, {Source::pmi, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
                  job.empty() ? parent_identity() : job);
}

/// Slurm numbers steps that no srun made (batch script, interactive shell, ...) from here on (slurm.h,
/// SLURM_MAX_NORMAL_STEP_ID).
constexpr uint64_t kFirstSpecialStep = 0xfffffff0;

bool inside_slurm_step(const Reader& reader) {
  const std::string step = reader.first_text({"SLURM_STEP_ID", "SLURM_STEPID"});
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(step.data(), step.data() + step.size(), number);
  return !step.empty() && error == std::errc() && number < kFirstSpecialStep && reader.has("SLURM_PROCID");
}

RankEnvironment from_slurm(Reader& reader) {
  RankEnvironment env{.source = Source::slurm};
  const std::string size_name = reader.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  env.rank = reader.required("SLURM_PROCID", 0, "srun sets it");
  env.size = reader.required(size_name, 1, "srun sets it");
  reader.below("SLURM_PROCID", env.rank, size_name, env.size);
  env.local_rank = reader.required("SLURM_LOCALID", 0, "srun sets it");
  env.node = reader.number("SLURM_NODEID", 0, Reader::kMost).value_or(0);
  env.nodes =
      reader.number(reader.has("SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES", 1, Reader::kMost)
          .value_or(1);
  reader.below("SLURM_NODEID", env.node, "the number of nodes", env.nodes);
  const std::string counts_name =
      reader.has("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE";
  env.local_size = env.nodes == 1 ? env.size : 1;
  if (env.nodes > 1) {
    try {
      const std::vector<int> counts = expand_slurm_counts(reader.text(counts_name));
      if (env.node < static_cast<int>(counts.size())) {
        env.local_size = counts[static_cast<size_t>(env.node)];
      } else {
        reader.findings.add(counts_name, fmt::format("'{}' names {} nodes, and SLURM_NODEID is {}",
                                                     reader.text(counts_name), counts.size(), env.node));
      }
    } catch (const ConfigError& error) {
      reader.findings.add(counts_name, error.what());
    }
  }
  reader.below("SLURM_LOCALID", env.local_rank, "the tasks of this node", env.local_size);
  env.run_id =
      reader.first_text({"SLURM_JOB_ID", "SLURM_JOBID"}) + "." + reader.first_text({"SLURM_STEP_ID", "SLURM_STEPID"});
  env.restart = reader.number("SLURM_RESTART_COUNT", 0, Reader::kMost).value_or(0);
  std::string first_host;
  try {
    const auto hosts =
        expand_slurm_hosts(reader.first_text({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}));
    if (!hosts.empty()) first_host = hosts.front();
  } catch (const ConfigError& error) {
    reader.findings.add("SLURM_STEP_NODELIST", error.what());
  }
  take_master(reader, env, first_host);
  return env;
}

RankEnvironment alone(const Reader& reader) {
  RankEnvironment env;
  const std::string tasks = reader.text("SLURM_NTASKS");
  if (!tasks.empty() && tasks != "1") {
    env.note = fmt::format(
        "this Slurm allocation has {} tasks, but this process is no task of a step and runs alone: start it with srun",
        tasks);
  }
  return env;
}

}  // namespace

std::string_view name(Source source) {
  switch (source) {
    case Source::alone:
      return "alone";
    case Source::torchrun:
      return "torchrun";
    case Source::slurm:
      return "Slurm";
    case Source::open_mpi:
      return "Open MPI";
    case Source::pmi:
      return "PMI";
  }
  throw InternalError("unknown launch source");
}

Environment process_environment() {
  Environment result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals != std::string_view::npos) result.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return result;
}

RankEnvironment read_environment(const Environment& environment) {
  Reader reader(environment);
  RankEnvironment result;
  if (reader.has("RANK") || reader.has("WORLD_SIZE")) {
    result = from_torchrun(reader);
  } else if (reader.has("OMPI_COMM_WORLD_RANK") || reader.has("OMPI_COMM_WORLD_SIZE")) {
    result = from_open_mpi(reader);
  } else if (inside_slurm_step(reader)) {  // before PMI: srun --mpi=pmi2 sets PMI_RANK too, and Slurm says more
    result = from_slurm(reader);
  } else if (reader.has("PMI_RANK") && reader.has("PMI_SIZE")) {
    result = from_pmi(reader);
  } else {
    result = alone(reader);
  }
  reader.findings.throw_if_any("the launcher's environment variables");
  return result;
}

RankEnvironment read_environment() {
  return read_environment(process_environment());
}

std::string local_rendezvous_key(const RankEnvironment& env) {
  const std::string text = fmt::format("{}|{}|{}|{}|{}|{}|{}", ::getuid(), name(env.source), env.run_id, env.restart,
                                       env.master_addr, env.master_port, env.size);
  return fmt::format("{:016x}", philox::stream_of(text));
}

}  // namespace weft::launch

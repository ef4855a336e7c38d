// Which rank this process is, as its launcher says in environment variables.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace weft::launch {

/// Who set the variables. `torchrun` is also `weft run` and anybody else who sets RANK and WORLD_SIZE.
enum class Source { alone, torchrun, slurm, open_mpi, pmi };
std::string_view name(Source source);

/// The place of this process among the ranks of its job.
struct RankEnvironment {
  int rank = 0;
  int size = 1;
  int local_rank = 0;  ///< index among the ranks of this node
  int local_size = 1;
  int node = 0;   ///< index of this node; -1 when the launcher does not say (mpirun over several nodes)
  int nodes = 1;  ///< -1 when the launcher does not say
  /// Host of rank 0, where it serves (or the launcher's agent already serves) the store. "127.0.0.1" on one node.
  std::string master_addr = "127.0.0.1";
  /// Where that store listens. 0 when alone. Launchers that name no port (Slurm, MPI) get one from 20000 .. 29999 that
  /// follows from run_id; MASTER_PORT overrides it.
  int master_port = 0;
  /// torchrun's agent already serves a store at master_addr:master_port; nobody else may listen there.
  bool agent_store = false;
  /// A TCP socket bound to master_port, not listening yet, that rank 0 inherits from `weft run`; -1 without.
  int listen_fd = -1;
  std::string run_id;  ///< the launcher's name of this job
  int restart = 0;     ///< how often the launcher started these ranks again
  Source source = Source::alone;
  /// A sentence for the user when the surroundings look like a job but this process is no rank of it; else empty.
  std::string note;
};

using Environment = std::map<std::string, std::string>;

/// The variables of this process.
Environment process_environment();

/// Reads, in this order of precedence: RANK and WORLD_SIZE (torchrun, `weft run`, by hand); OMPI_COMM_WORLD_*; PMI_RANK
/// and PMI_SIZE (MPICH, Intel MPI); SLURM_* inside a step of srun. None of them: alone. Throws ConfigError with every
/// malformed or contradictory variable: its name, value, and the rule.
RankEnvironment read_environment(const Environment& environment);
RankEnvironment read_environment();

/// A name for the meeting of the ranks that share a node (for instance of a Unix socket): 16 hexadecimal digits. Equal
/// on all ranks of one start of a job, different between jobs and between restarts. It hashes the user's id, the
/// source, run_id, restart, master_addr, master_port and size. run_id is unique to a job under `weft run`, Slurm (job
/// and step) and Open MPI (name space); under torchrun the port, which only one job can hold, tells jobs apart; under
/// PMI without PMI_JOBID the process that started the ranks does, so a rank must not be wrapped in a shell that stays
/// alive.
std::string local_rendezvous_key(const RankEnvironment& environment);

/// Hosts of a Slurm list, in order: "n[1-2,07],gpu3" gives n1, n2, n07, gpu3. ConfigError when malformed.
std::vector<std::string> expand_slurm_hosts(const std::string& list);
/// Tasks of each node in Slurm's form: "2(x2),1" gives 2, 2, 1. ConfigError when malformed.
std::vector<int> expand_slurm_counts(const std::string& list);

}  // namespace weft::launch

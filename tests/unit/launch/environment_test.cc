#include "weft/launch/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/support/message.h"
#include "weft/core/error.h"

namespace weft::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string error_of(const Environment& environment) {
  return testing::config_error([&] { read_environment(environment); });
}

// What torchrun of PyTorch 2.15 sets with --nnodes 2 --nproc-per-node 2 on the second node.
const Environment kTorchrun{{"RANK", "3"},
                            {"WORLD_SIZE", "4"},
                            {"LOCAL_RANK", "1"},
                            {"LOCAL_WORLD_SIZE", "2"},
                            {"GROUP_RANK", "1"},
                            {"GROUP_WORLD_SIZE", "2"},
                            {"MASTER_ADDR", "n0"},
                            {"MASTER_PORT", "29500"},
                            {"TORCHELASTIC_RUN_ID", "job7"},
                            {"TORCHELASTIC_RESTART_COUNT", "2"},
                            {"TORCHELASTIC_USE_AGENT_STORE", "True"}};

// What srun -N2 -n4 of Slurm 22.05 sets for the last task.
const Environment kSlurm{{"SLURM_JOB_ID", "12"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "3"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_STEP_NUM_TASKS", "4"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NODEID", "1"},
                         {"SLURM_NNODES", "2"},
                         {"SLURM_STEP_NUM_NODES", "2"},
                         {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                         {"SLURM_STEP_NODELIST", "n[0-1]"}};

// What mpirun -n 2 of Open MPI 4.1 sets on one node.
const Environment kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                           {"OMPI_COMM_WORLD_SIZE", "2"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                           {"PMIX_NAMESPACE", "1839005697"}};

// What mpiexec -n 2 of MPICH 4.0 sets on one node.
const Environment kPmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};

Environment with(Environment base, const Environment& changes) {
  for (const auto& [key, value] : changes) base[key] = value;
  return base;
}

Environment without(Environment base, const std::string& key) {
  base.erase(key);
  return base;
}

TEST(Environment, Alone) {
  const RankEnvironment env = read_environment({{"PATH", "/bin"}});
  EXPECT_EQ(env.source, Source::alone);
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.size, 1);
  EXPECT_EQ(env.note, "");
}

TEST(Environment, Torchrun) {
  const RankEnvironment env = read_environment(kTorchrun);
  EXPECT_EQ(env.source, Source::torchrun);
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.size, 4);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_size, 2);
  EXPECT_EQ(env.node, 1);
  EXPECT_EQ(env.nodes, 2);
  EXPECT_EQ(env.master_addr, "n0");
  EXPECT_EQ(env.master_port, 29500);
  EXPECT_TRUE(env.agent_store);
  EXPECT_EQ(env.run_id, "job7");
  EXPECT_EQ(env.restart, 2);
  EXPECT_EQ(env.listen_fd, -1);
}

TEST(Environment, ByHandOnOneMachine) {
  const RankEnvironment env = read_environment({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "4000"}});
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_size, 2);
  EXPECT_EQ(env.node, 0);
  EXPECT_EQ(env.master_addr, "127.0.0.1");
  EXPECT_FALSE(env.agent_store);
}

TEST(Environment, ListenDescriptorIsForRankZeroOnly) {
  const Environment both{{"WORLD_SIZE", "2"}, {"MASTER_PORT", "4000"}, {"WEFT_MASTER_LISTEN_FD", "5"}};
  EXPECT_EQ(read_environment(with(both, {{"RANK", "0"}})).listen_fd, 5);
  EXPECT_EQ(read_environment(with(both, {{"RANK", "1"}})).listen_fd, -1);
}

TEST(Environment, TorchrunInsideSlurmOrMpiWins) {
  Environment nested = with(kSlurm, kOpenMpi);
  for (const auto& [key, value] : kTorchrun) nested[key] = value;
  EXPECT_EQ(read_environment(nested).source, Source::torchrun);
  EXPECT_EQ(read_environment(with(kSlurm, kOpenMpi)).source, Source::open_mpi);
  EXPECT_EQ(read_environment(with(kSlurm, kPmi)).source, Source::slurm);
}

TEST(Environment, Slurm) {
  const RankEnvironment env = read_environment(kSlurm);
  EXPECT_EQ(env.source, Source::slurm);
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.size, 4);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_size, 2);
  EXPECT_EQ(env.node, 1);
  EXPECT_EQ(env.nodes, 2);
  EXPECT_EQ(env.master_addr, "n0");
  EXPECT_GE(env.master_port, 20000);
  EXPECT_LT(env.master_port, 30000);
  EXPECT_EQ(env.run_id, "12.0");
  EXPECT_EQ(read_environment(with(kSlurm, {{"MASTER_PORT", "7777"}, {"MASTER_ADDR", "ib0"}})).master_port, 7777);
}

TEST(Environment, SlurmUnevenTasks) {
  const auto env = read_environment(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "3"},
                                                  {"SLURM_PROCID", "2"},
                                                  {"SLURM_LOCALID", "0"},
                                                  {"SLURM_STEP_TASKS_PER_NODE", "2,1"}}));
  EXPECT_EQ(env.local_size, 1);
}

// A batch script has SLURM_PROCID = 0 and SLURM_NTASKS too, but is no task of a step.
TEST(Environment, SlurmOutsideAStepIsAloneAndSaysSo) {
  for (const Environment& outside : {without(kSlurm, "SLURM_STEP_ID"), with(kSlurm, {{"SLURM_STEP_ID", "4294967291"}}),
                                     with(kSlurm, {{"SLURM_STEP_ID", "4294967290"}})}) {
    const RankEnvironment env = read_environment(outside);
    EXPECT_EQ(env.source, Source::alone);
    EXPECT_EQ(env.size, 1);
    EXPECT_THAT(env.note, HasSubstr("has 4 tasks"));
    EXPECT_THAT(env.note, HasSubstr("srun"));
  }
}

TEST(Environment, OpenMpiAndPmiOnOneNode) {
  for (const Environment& variables : {kOpenMpi, kPmi}) {
    const RankEnvironment env = read_environment(variables);
    EXPECT_EQ(env.rank, 1);
    EXPECT_EQ(env.size, 2);
    EXPECT_EQ(env.local_rank, 1);
    EXPECT_EQ(env.local_size, 2);
    EXPECT_EQ(env.node, 0);
    EXPECT_EQ(env.nodes, 1);
    EXPECT_FALSE(env.run_id.empty());
    EXPECT_EQ(env.master_addr, "127.0.0.1");
    EXPECT_GE(env.master_port, 20000);
  }
}

TEST(Environment, MpiOverSeveralNodesNeedsAMaster) {
  const Environment two = with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}});
  EXPECT_THAT(error_of(two), HasSubstr("MASTER_ADDR: is not set, and the 4 ranks stand on several nodes"));
  const RankEnvironment env = read_environment(with(two, {{"MASTER_ADDR", "n0"}}));
  EXPECT_EQ(env.node, -1);
  EXPECT_EQ(env.master_addr, "n0");
  EXPECT_GE(env.master_port, 20000);
}

TEST(Environment, EveryMalformedValueIsNamed) {
  const std::string text = error_of(with(kTorchrun, {{"RANK", "4"}, {"LOCAL_RANK", "two"}, {"MASTER_PORT", "70000"}}));
  EXPECT_THAT(text, HasSubstr("3 problems"));
  EXPECT_THAT(text, HasSubstr("RANK: 4 must be below WORLD_SIZE = 4"));
  EXPECT_THAT(text, HasSubstr("LOCAL_RANK: 'two' is not a whole number of at least 0"));
  EXPECT_THAT(text, HasSubstr("MASTER_PORT: '70000' is not a whole number from 1 to 65535"));
}

TEST(Environment, ContradictionsAreNamed) {
  EXPECT_THAT(error_of({{"RANK", "0"}}), HasSubstr("WORLD_SIZE: is not set"));
  EXPECT_THAT(error_of({{"WORLD_SIZE", "2"}}), HasSubstr("RANK: is not set"));
  EXPECT_THAT(error_of(with(kTorchrun, {{"LOCAL_RANK", "2"}})),
              HasSubstr("LOCAL_RANK: 2 must be below LOCAL_WORLD_SIZE = 2"));
  EXPECT_THAT(error_of(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "8"}})),
              HasSubstr("LOCAL_WORLD_SIZE: 8 exceeds WORLD_SIZE = 4"));
  EXPECT_THAT(error_of(with(kTorchrun, {{"WORLD_SIZE", "-1"}})), HasSubstr("WORLD_SIZE: '-1'"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("MASTER_PORT: is not set"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "far"}, {"MASTER_PORT", "1"}}),
              HasSubstr("LOCAL_WORLD_SIZE: is not set"));
  EXPECT_THAT(error_of(with(kSlurm, {{"SLURM_LOCALID", "2"}})), HasSubstr("SLURM_LOCALID: 2 must be below"));
  EXPECT_THAT(error_of(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "2(x"}})),
              HasSubstr("SLURM_STEP_TASKS_PER_NODE: '2(x'"));
  EXPECT_THAT(error_of(with(kPmi, {{"PMI_RANK", "9"}})), HasSubstr("PMI_RANK: 9 must be below PMI_SIZE = 2"));
}

TEST(Environment, RendezvousKey) {
  const auto key = [](const Environment& variables) { return local_rendezvous_key(read_environment(variables)); };
  EXPECT_EQ(key(kTorchrun), key(with(kTorchrun, {{"RANK", "2"}, {"LOCAL_RANK", "0"}})));
  EXPECT_NE(key(kTorchrun), key(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "3"}})));
  EXPECT_NE(key(kTorchrun), key(with(kTorchrun, {{"MASTER_PORT", "29501"}})));
  EXPECT_EQ(key(kSlurm), key(with(kSlurm, {{"SLURM_PROCID", "2"}, {"SLURM_LOCALID", "0"}})));
  EXPECT_NE(key(kSlurm), key(with(kSlurm, {{"SLURM_STEP_ID", "1"}})));
  EXPECT_NE(key(kOpenMpi), key(with(kOpenMpi, {{"PMIX_NAMESPACE", "1839005698"}})));
  EXPECT_EQ(key(kPmi), key(with(kPmi, {{"PMI_RANK", "0"}, {"MPI_LOCALRANKID", "0"}})));
}

TEST(SlurmLists, Hosts) {
  EXPECT_THAT(expand_slurm_hosts("n[1-3,07],gpu3"), ElementsAre("n1", "n2", "n3", "n07", "gpu3"));
  EXPECT_THAT(expand_slurm_hosts("n[08-10]"), ElementsAre("n08", "n09", "n10"));
  EXPECT_THAT(expand_slurm_hosts("r[1-2]n[0-1]-ib"), ElementsAre("r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib"));
  EXPECT_THAT(expand_slurm_hosts(""), ElementsAre());
  for (const char* bad : {"n[1-", "n]1[", "n[]", "n[a-b]", "n[3-1]", "a,,b"}) {
    EXPECT_THAT(testing::config_error([&] { expand_slurm_hosts(bad); }), HasSubstr("is not a Slurm host list")) << bad;
  }
}

TEST(SlurmLists, Counts) {
  EXPECT_THAT(expand_slurm_counts("2(x2),1"), ElementsAre(2, 2, 1));
  EXPECT_THAT(expand_slurm_counts("4"), ElementsAre(4));
  for (const char* bad : {"", "x", "2(x2", "2(y2)", "0", "2,,1"}) {
    EXPECT_THAT(testing::config_error([&] { expand_slurm_counts(bad); }), HasSubstr("tasks per node")) << bad;
  }
}

}  // namespace
}  // namespace weft::launch

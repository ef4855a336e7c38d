// What a row of a runs table says, in words, about the software and the network.
#pragma once

#include <string>
#include <vector>

#include "weft/plan/job.h"

namespace weft::plan {

class RunRow;

std::string lower_case(std::string text);

/// The GPT form: LayerNorm, biases, plain MLP, learned positions. Told by the model's name, else by 4 x hidden widths.
bool is_gpt(const RunRow& row);

/// Device, node and network: "800 Gb/s per node", "4x100 Gb/s ... per node", "400 Gb/s per GPU", else the device's usual NIC.
machine::Machine machine_of_run(const RunRow& row);

/// Kernel fusion, overlap and precision of gradients, from columns and notes ("torch.compile", "eager", "async TP", "no ... overlap").
machine::Software software_of_run(const RunRow& row, const machine::Machine& machine);

/// ZeRO stage, shard group, recompute, sequence parallelism and schedule.
void fill_strategy(const RunRow& row, const machine::Software& software, layout::Layout& layout, std::vector<std::string>& assumptions);

/// Memory models of papers: states of the blocks alone plus classic activations (Korthikanti et al. 2022, figure 1).
double analytic_bytes(const Job& job);

}  // namespace weft::plan

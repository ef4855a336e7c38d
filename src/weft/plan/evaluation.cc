#include "weft/plan/evaluation.h"

namespace weft::plan {

using cost::Context;

Evaluation::Evaluation(const Job& j, const cost::Tuning& t)
    : job(j), tuning(t), context(Context::of(j.layout, j.machine, j.software, t, static_cast<double>(j.sequence), j.precision, j.model.layer_norm)) {
  for (const ModelSummary::Kind& kind : job.model.kinds) kinds.push_back(cost::block_work(kind.block, job.model.hidden, context));
  head = cost::head_work(job.model.hidden, job.model.vocab, context);
  embedding = cost::embedding_work(job.model.hidden, job.model.vocab, context);
}

void Evaluation::finish(Part& part) const {
  if (job.software.graphs || job.software.captured_blocks) return;
  // Beside what runs on the device, modules in Python view, transpose, allocate and record for the backward. A recompute block
  // enters again what it wraps and saves and restores random state.
  const double kernel = 1e-6 * tuning.host_kernel_us;
  part.take_turns = job.software.blocking_launches;
  part.host_forward = part.forward.launches * kernel;
  part.host_backward = (part.input.launches + part.weight.launches + part.recompute.launches) * kernel;
  if (job.software.python_checkpoint) part.host_backward += part.layers * 1e-6 * tuning.host_recompute_us;
}

double Evaluation::last_part_blocks() const {
  const double block = kinds.back().total(), further = job.model.mtp_layers;
  return block > 0 ? (1 + further) * head.total() / block + further : 0;
}

std::vector<Part> Evaluation::parts() const {
  const layout::Layout& layout = job.layout;
  const std::vector<int64_t> split = layout::split_layers(static_cast<int64_t>(job.model.kind_of_layer.size()), layout.pp, layout.chunks, last_part_blocks());
  std::vector<Part> parts(split.size());
  size_t layer = 0;
  for (size_t index = 0; index < split.size(); ++index) {
    Part& part = parts[index];
    // Runs of equal blocks are added at once: most models have one kind.
    for (int64_t left = split[index]; left > 0;) {
      const int kind = job.model.kind_of_layer[layer];
      int64_t run = 1;
      while (run < left && job.model.kind_of_layer[layer + static_cast<size_t>(run)] == kind) ++run;
      part.add(kinds[static_cast<size_t>(kind)], static_cast<double>(run));
      const ModelSummary::Kind& of = job.model.kinds[static_cast<size_t>(kind)];
      part.dense += static_cast<double>(run) * block_parameters(of);
      part.expert += static_cast<double>(run) * block_expert_parameters(of);
      part.layers += static_cast<double>(run);
      layer += static_cast<size_t>(run);
      left -= run;
    }
  }
  const double tp = static_cast<double>(layout.tp);
  parts.front().add(embedding, 1);
  parts.front().dense += job.model.embedding_parameters / tp;
  Part& last = parts.back();
  last.add(head, 1);
  if (!job.model.tied || layout.pp > 1) last.dense += job.model.head_parameters / tp;
  if (job.model.mtp_layers > 0) {
    last.add(kinds.back(), job.model.mtp_layers);
    last.add(head, job.model.mtp_layers);
    last.dense += job.model.mtp_layers * block_parameters(job.model.kinds.back());
    last.expert += job.model.mtp_layers * block_expert_parameters(job.model.kinds.back());
  }
  for (Part& part : parts) finish(part);
  return parts;
}

}  // namespace weft::plan

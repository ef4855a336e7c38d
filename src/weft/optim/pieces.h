// Pieces of flat tensors as kernels take them: pointers, and gradients in the precision of the update.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

namespace weft::optim {

/// Elements of one task: large enough to hide the cost of a task, a multiple of any vector length and of kQuantBlock.
constexpr int64_t kGrain = 1 << 15;

inline uint16_t* bits_of(const at::Tensor& t, int64_t offset) {
  return reinterpret_cast<uint16_t*>(t.mutable_data_ptr<at::BFloat16>()) + offset;
}

/// One flat piece of an update, [begin, begin + n) of every tensor.
struct Piece {
  int64_t begin, n;
  at::Tensor of(const at::Tensor& t) const { return t.narrow(0, begin, n); }
  template <class T>
  T* at(const at::Tensor& t) const {
    return t.mutable_data_ptr<T>() + begin;
  }
};

template <class Fn>
void for_pieces(int64_t numel, const Fn& fn) {
  at::parallel_for(0, (numel + kGrain - 1) / kGrain, 1, [&](int64_t first, int64_t last) {
    const at::NoGradGuard no_grad;
    for (int64_t k = first; k < last; ++k) fn(Piece{k * kGrain, std::min(kGrain, numel - k * kGrain)});
  });
}

/// What an update of 16-bit parameters does beside the weights: `copy` [n] undefined, bf16 (written by the loop itself if the
/// weights are fp32), or anything that is converted piece by piece.
class Copy {
 public:
  Copy(const at::Tensor& copy, const at::Tensor& weight)
      : copy_(copy), weight_(weight), in_loop_(copy.defined() && copy.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kFloat) {}
  uint16_t* target(const Piece& piece) const { return in_loop_ ? bits_of(copy_, piece.begin) : nullptr; }
  void finish(const Piece& piece) const {
    if (copy_.defined() && !in_loop_) piece.of(copy_).copy_(piece.of(weight_));
  }

 private:
  const at::Tensor& copy_;
  const at::Tensor& weight_;
  bool in_loop_;
};

}  // namespace weft::optim

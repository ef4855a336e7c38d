#include "weft/autograd/random_state.h"

#include <ATen/Context.h>

#include <mutex>

namespace weft::autograd {
namespace {

at::Generator generator() { return at::globalContext().defaultGenerator(at::kCPU); }

}  // namespace

RandomState RandomState::now() {
  at::Generator source = generator();
  const std::lock_guard lock(source.mutex());
  auto* const impl = at::check_generator<at::CPUGeneratorImpl>(source);
  RandomState state;
  state.engine_ = impl->engine();
  state.next_float_ = impl->next_float_normal_sample();
  state.next_double_ = impl->next_double_normal_sample();
  return state;
}

void RandomState::restore() const {
  at::Generator target = generator();
  const std::lock_guard lock(target.mutex());
  auto* const impl = at::check_generator<at::CPUGeneratorImpl>(target);
  impl->set_engine(engine_);
  impl->set_next_float_normal_sample(next_float_);
  impl->set_next_double_normal_sample(next_double_);
}

bool RandomState::operator==(const RandomState& other) const {
  const at::mt19937_data_pod a = engine_.data(), b = other.engine_.data();
  return a.seed_ == b.seed_ && a.left_ == b.left_ && a.seeded_ == b.seeded_ && a.next_ == b.next_ && a.state_ == b.state_ &&
         next_float_ == other.next_float_ && next_double_ == other.next_double_;
}

}  // namespace weft::autograd

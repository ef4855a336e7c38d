#include "weft/parallel/unit_calls.h"

#include <ATen/core/grad_mode.h>

#include "weft/autograd/saved_tensors.h"

namespace weft::parallel {
namespace {

class Calls final : public nn::UnitHooks {
 public:
  Calls(std::weak_ptr<RoundEngine> engine, UnitGathers& gathers, size_t unit)
      : engine_(std::move(engine)), gathers_(&gathers), unit_(unit) {}

  void before_forward() override {
    const auto engine = engine_.lock();
    if (!engine) return;
    engine->settle();
    gathers_->begin_forward(unit_);
  }

  void after_forward(const std::vector<at::Tensor>& outputs) override {
    if (!engine_.lock()) return;
    gathers_->end_forward(unit_);
    for (const at::Tensor& output : outputs) {
      if (!output.requires_grad()) continue;
      output.register_hook([engine = engine_, gathers = gathers_, unit = unit_](const at::Tensor&) {
        const auto self = engine.lock();
        if (!self) return;
        self->settle();
        self->enter_backward();
        gathers->begin_backward(unit);
        // This backward is to be differentiated, and its graph will hold parameters that are released before.
        if (at::GradMode::is_enabled()) autograd::install_saved_tensor_hooks();
      });
    }
  }

  void needed_in_backward() override {
    const auto self = engine_.lock();
    if (!self) return;
    self->settle();
    self->enter_backward();
    gathers_->use_in_backward(unit_);
  }

  void forward_threw() override {
    if (engine_.lock()) gathers_->end_forward(unit_);
  }

 private:
  std::weak_ptr<RoundEngine> engine_;
  UnitGathers* gathers_;  // alive while the engine is
  size_t unit_;
};

}  // namespace

std::shared_ptr<nn::UnitHooks> watch_unit(std::weak_ptr<RoundEngine> engine, UnitGathers& gathers, size_t unit) {
  return std::make_shared<Calls>(std::move(engine), gathers, unit);
}

}  // namespace weft::parallel

// Update rules of the papers in plain tensor operations, on whole tensors in fp64, without a line of Weft.
#pragma once

#include <torch/types.h>

#include <cmath>
#include <vector>

namespace weft::reference {

using torch::Tensor;

/// AdamW, Loshchilov and Hutter 2019, algorithm 2 with a constant schedule.
struct AdamW {
  double lr = 1e-2, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1;
  Tensor m, v;
  int step = 0;

  virtual ~AdamW() = default;
  /// What is kept of a moment until the next step.
  virtual Tensor kept(const Tensor& moment, bool /*with_sign*/) const { return moment; }

  void update(Tensor& w, const Tensor& g) {
    if (!m.defined()) m = torch::zeros_like(w), v = torch::zeros_like(w);
    ++step;
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    const Tensor mean = m / (1 - std::pow(beta1, step)), square = v / (1 - std::pow(beta2, step));
    w = w - lr * decay * w - lr * mean / (square.sqrt() + eps);
    m = kept(m, true);
    v = kept(v, false);
  }
};

/// Moments rounded to bf16 after every step.
struct AdamWBf16Moments : AdamW {
  Tensor kept(const Tensor& moment, bool) const override { return moment.to(torch::kBFloat16).to(torch::kDouble); }
};

/// The 8-bit codes of Dettmers et al. 2022: for each of seven powers of ten the middles of equal parts of its decade, 0 and 1.
inline Tensor dynamic_code(bool with_sign) {
  std::vector<double> values{0.0, 1.0};
  for (int decade = 0; decade < 7; ++decade) {
    const Tensor edges = torch::linspace(0.1, 1, (1 << (decade + (with_sign ? 0 : 1))) + 1, torch::kDouble);
    for (int64_t i = 0; i + 1 < edges.size(0); ++i) {
      const double middle = std::pow(10.0, decade - 6) * (edges[i].item<double>() + edges[i + 1].item<double>()) / 2;
      values.push_back(middle);
      if (with_sign) values.push_back(-middle);
    }
  }
  return std::get<0>(torch::sort(torch::tensor(values, torch::kDouble)));
}

/// Blocks of 256 from the beginning, each divided by its largest magnitude and rounded to the nearest code. Numbers above zero do not
/// become zero when there are no negative ones (second moments).
struct Adam8bit : AdamW {
  Tensor kept(const Tensor& moment, bool with_sign) const override {
    if (moment.numel() < 4096) return moment;
    const Tensor codes = dynamic_code(with_sign), flat = moment.flatten();
    Tensor out = torch::empty_like(flat);
    for (int64_t begin = 0; begin < flat.numel(); begin += 256) {
      const Tensor block = flat.narrow(0, begin, std::min<int64_t>(256, flat.numel() - begin));
      const Tensor scale = block.abs().max();
      if (scale.item<double>() == 0) {
        out.narrow(0, begin, block.numel()).zero_();
        continue;
      }
      Tensor nearest = codes.index({((block / scale).unsqueeze(1) - codes).abs().argmin(1)});
      if (!with_sign) nearest = torch::where((block > 0).logical_and(nearest == 0), codes[1], nearest);
      out.narrow(0, begin, block.numel()).copy_(nearest * scale);
    }
    return out.view(moment.sizes());
  }
};

/// Chen et al. 2023, algorithm 2.
struct Lion {
  double lr = 1e-2, beta1 = 0.9, beta2 = 0.99, decay = 0.1;
  Tensor m;

  void update(Tensor& w, const Tensor& g) {
    if (!m.defined()) m = torch::zeros_like(w);
    const Tensor direction = torch::sign(beta1 * m + (1 - beta1) * g);
    w = w - lr * (direction + decay * w);
    m = beta2 * m + (1 - beta2) * g;
  }
};

/// Shazeer and Stern 2018, algorithm 4 (matrices) and 5 (others), with the relative rate `lr` given, decoupled decay and optional momentum.
struct Adafactor {
  double lr = 1e-2, eps1 = 1e-30, eps2 = 1e-3, clip = 1, power = 0.8, beta1 = 0, decay = 0.1;
  bool relative = true;
  Tensor rows, columns, v, m;
  int step = 0;

  static Tensor rms(const Tensor& x) { return x.square().mean().sqrt(); }

  void update(Tensor& w, const Tensor& g) {
    ++step;
    const double beta2 = 1 - std::pow(step, -power), alpha = lr * (relative ? std::max(eps2, rms(w).item<double>()) : 1.0);
    const Tensor squares = g.square() + eps1;
    Tensor second;
    if (w.dim() == 2) {
      if (step == 1) rows = torch::zeros(w.size(0), torch::kDouble), columns = torch::zeros(w.size(1), torch::kDouble);
      rows = beta2 * rows + (1 - beta2) * squares.sum(1);
      columns = beta2 * columns + (1 - beta2) * squares.sum(0);
      second = torch::outer(rows, columns) / rows.sum();
    } else {
      if (step == 1) v = torch::zeros_like(w);
      v = beta2 * v + (1 - beta2) * squares;
      second = v;
    }
    Tensor u = g / second.sqrt();
    u = u / std::max(1.0, rms(u).item<double>() / clip);
    if (beta1 > 0) {
      if (step == 1) m = torch::zeros_like(w);
      m = beta1 * m + (1 - beta1) * u;
      u = m;
    }
    w = w - alpha * decay * w - alpha * u;
  }
};

/// Jordan et al. 2024; scale and decay of Liu et al. 2025.
struct Muon {
  double lr = 1e-2, momentum = 0.95, decay = 0.1;
  bool nesterov = true, match_adamw = true;
  Tensor buffer;

  static Tensor newton_schulz(const Tensor& g) {
    const bool tall = g.size(0) > g.size(1);
    Tensor x = (tall ? g.t() : g) / (g.square().sum().sqrt() + 1e-7);
    for (int i = 0; i < 5; ++i) {
      const Tensor a = x.matmul(x.t());
      x = 3.4445 * x + (-4.7750 * a + 2.0315 * a.matmul(a)).matmul(x);
    }
    return tall ? x.t() : x;
  }

  void update(Tensor& w, const Tensor& g) {
    if (!buffer.defined()) buffer = torch::zeros_like(w);
    buffer = momentum * buffer + (1 - momentum) * g;
    const Tensor direction = newton_schulz(nesterov ? momentum * buffer + (1 - momentum) * g : buffer);
    const auto r = static_cast<double>(w.size(0)), c = static_cast<double>(w.size(1));
    const double scale = match_adamw ? 0.2 * std::sqrt(std::max(r, c)) : std::sqrt(std::max(1.0, r / c));
    w = w - lr * decay * w - lr * scale * direction;
  }
};

}  // namespace weft::reference

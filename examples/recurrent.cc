// A recurrent network under ZeRO-3: an LSTM, a cell that is used at every time step, an embedding that is used twice, and a branch
// that a rank takes only if its rows need it. The argument is the position of the dial: 0 (DDP) to 3 (the default).
//   weft run -n 2 -- example_recurrent
#include <torch/torch.h>
#include <weft/weft.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

constexpr int64_t kSymbols = 8, kWidth = 12, kTime = 7, kRows = 12, kTurned = 4;

// Rows count up by 1, 2 or 3 modulo kSymbols; the first kTurned rows count down. [kTime + 1, kRows]
torch::Tensor sequences() {
  const auto row = torch::arange(kRows), time = torch::arange(kTime + 1).unsqueeze(1);
  const auto step = (row % 3 + 1) * torch::where(row < kTurned, -1, 1);
  return torch::remainder(row + time * step, kSymbols);
}

struct NetImpl : torch::nn::Module {
  torch::nn::Embedding symbols{kSymbols, kWidth};  // outside of Units, because it is used in two places: kept whole
  weft::Unit<torch::nn::LSTM> reader{torch::nn::LSTMOptions(kWidth, kWidth)};
  weft::Unit<torch::nn::GRUCell> cell{torch::nn::GRUCellOptions(kWidth, kWidth)};
  weft::Unit<torch::nn::Linear> turn{kWidth, kWidth};
  NetImpl() {
    register_module("symbols", symbols);
    register_module("reader", reader);
    register_module("cell", cell);
    register_module("turn", turn);
  }
  // x: [kTime, B], turned: rows among them that count down -> [kTime, B, kSymbols], scores of the next symbol
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& turned) {
    const auto [read, last] = reader->forward(symbols(x), std::nullopt);
    auto state = torch::zeros_like(read[0]);
    std::vector<torch::Tensor> scores;
    for (int64_t t = 0; t < kTime; ++t) {
      state = cell->forward(read[t], state);
      auto out = state;
      if (turned.numel() > 0) out = out.index_add(0, turned, turn(state.index_select(0, turned)));
      scores.push_back(torch::matmul(out, symbols->weight.t()));
    }
    return torch::stack(scores);
  }
};
TORCH_MODULE(Net);

int main(int argc, char** argv) {
  auto world = weft::World::init();
  torch::manual_seed(3);
  Net net;
  net->to(torch::kDouble);
  weft::DataParallel dp(net, world.comm(), {.sharding = weft::sharding_of_zero(argc > 1 ? std::atoi(argv[1]) : 3)});
  weft::optim::AdamW opt(weft::optim::decay_matrices_only(dp, weft::optim::AdamWOptions(2e-2).weight_decay(0.01)));
  const int64_t rows = kRows / world.size(), first = world.rank() * rows;
  const auto mine = sequences().narrow(1, first, rows);
  const auto turned = torch::arange(std::clamp<int64_t>(kTurned - first, 0, rows));  // none on the last ranks
  for (int step = 1; step <= 30; ++step) {
    auto scores = net(mine.narrow(0, 0, kTime), turned);
    auto loss_sum = torch::nn::functional::cross_entropy(scores.flatten(0, 1), mine.narrow(0, 1, kTime).flatten(),
                                                         torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
    weft::global_mean(loss_sum, kTime * rows, dp).backward();
    dp.clip_grad_norm(1.0);
    opt.step();
    dp.zero_grad();
    auto total = loss_sum.detach();
    world.comm().all_reduce(total).wait();
    if (world.rank() == 0 && step % 5 == 0) std::printf("step %d: loss %.12f\n", step, total.item<double>() / (kTime * kRows));
  }
}

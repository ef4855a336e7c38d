// Random calls on the engine of the local back end, checked against values that every rank can compute by itself. Free of torch,
// so that it also runs under ThreadSanitizer in seconds. Ranks may be threads or processes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "weft/comm/local/engine.h"
#include "weft/comm/local/reduce.h"

namespace weft::local::stress {

inline constexpr std::chrono::seconds kDeadline{60};  // far above what a loaded machine needs

struct Options {
  int operations = 500;
  uint64_t seed = 1;
  size_t max_elements = 3000;   ///< usually; one in `large_every` is up to large_elements
  size_t large_elements = 700'000;
  int large_every = 40;
  size_t in_flight = 6;
};

// --- values and the reference ----------------------------------------------------------------------------------------------

/// Small integers, exact in every dtype and in every partial sum of 8 ranks.
inline int value(uint64_t call, int rank, size_t index, Reduce op) {
  uint64_t h = call * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(rank) * 0xBF58476D1CE4E5B9ull + index * 0x94D049BB133111EBull;
  h ^= h >> 29;
  h *= 0xBF58476D1CE4E5B9ull;
  h ^= h >> 32;
  return op == Reduce::product ? 1 + static_cast<int>(h % 2) : static_cast<int>(h % 8);
}

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/// Normal positive numbers only; rounds to nearest even.
inline uint16_t to_f16(float x) {
  if (x == 0) return 0;
  int exponent;
  const float mantissa = std::frexp(x, &exponent);  // [0.5, 1)
  const int scaled = static_cast<int>(std::nearbyint(std::ldexp(mantissa, 11)));  // 1024 .. 2048
  return static_cast<uint16_t>(((exponent - 1 + 15) << 10) + scaled - 1024);
}

inline void put(char* at, Dtype dtype, double x) {
  const auto write = [at](auto v) { std::memcpy(at, &v, sizeof(v)); };
  switch (dtype) {
    case Dtype::f32: return write(static_cast<float>(x));
    case Dtype::f64: return write(x);
    case Dtype::bf16: return write(to_bf16(static_cast<float>(x)));
    case Dtype::f16: return write(to_f16(static_cast<float>(x)));
    case Dtype::i16: return write(static_cast<int16_t>(x));
    case Dtype::i32: return write(static_cast<int32_t>(x));
    case Dtype::i64: return write(static_cast<int64_t>(x));
    default: return write(static_cast<int8_t>(x));
  }
}

inline double combined(const std::vector<int>& ranks, uint64_t call, size_t index, Reduce op, Dtype dtype) {
  double total = value(call, ranks[0], index, op);
  for (size_t r = 1; r < ranks.size(); ++r) {
    const double next = value(call, ranks[r], index, op);
    if (op == Reduce::min) total = std::min(total, next);
    else if (op == Reduce::max) total = std::max(total, next);
    else if (op == Reduce::product) total *= next;
    else total += next;
  }
  if (op != Reduce::avg) return total;
  const double n = static_cast<double>(ranks.size());
  if (dtype == Dtype::f64) return total / n;
  if (dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16) return static_cast<float>(total) / static_cast<float>(n);
  return std::trunc(total / n);
}

// --- one call under test ---------------------------------------------------------------------------------------------------

/// Memory of a call on this rank: private, or a piece of a shared block.
struct Buffer {
  std::vector<char> owned;
  char* data = nullptr;
};

struct Pending {
  std::shared_ptr<Op> op;
  Buffer input, output;           // output empty: in place
  std::vector<char> expected;     // of the output, or of the input when in place
  char* checked = nullptr;
  std::string text;
};

class Rank {
 public:
  Rank(Engine& engine, Options options) : engine_(engine), options_(options), shared_random_(options.seed) {
    own_random_.seed(options.seed * 7919 + static_cast<uint64_t>(engine.rank()));
    make_groups();
  }

  void run() {
    for (int call = 0; call < options_.operations; ++call) {
      one(static_cast<uint64_t>(call));
      if (own_random_() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_random_() % 300));
      if (own_random_() % 4 == 0) engine_.progress();
      while (pending_.size() > options_.in_flight) finish(own_random_() % pending_.size());
    }
    while (!pending_.empty()) finish(0);
    for (auto& group : groups_) {
      auto op = std::make_shared<Op>();
      op->timeout = kDeadline;
      engine_.start(group->collectives(), op);
      engine_.wait(*op, Until::complete, {});
    }
    for (auto& block : blocks_) block->release();
  }

 private:
  void make_groups() {
    std::vector<std::vector<int>> sets;
    std::vector<int> all;
    for (int r = 0; r < engine_.size(); ++r) all.push_back(r);
    sets.push_back(all);
    sets.push_back({all.rbegin(), all.rend()});
    for (int r = 0; r + 1 < engine_.size(); ++r) sets.push_back({r, r + 1});
    if (engine_.size() > 2) sets.push_back({engine_.size() - 1, 0});
    for (const auto& set : sets) {
      memberships_.push_back(set);
      if (std::find(set.begin(), set.end(), engine_.rank()) == set.end()) continue;
      groups_.push_back(engine_.create_group(set, "stress", kDeadline));
      blocks_.push_back(engine_.allocate(*groups_.back(), options_.large_elements * 8 * set.size() + 4096, kDeadline));
      block_used_.push_back(0);
    }
  }

  uint64_t shared(uint64_t below) { return shared_random_() % below; }
  uint64_t own(uint64_t below) { return own_random_() % below; }

  // All ranks draw the same call from shared_random_; only members take part. Where its memory lies each draws for itself.
  void one(uint64_t call) {
    const size_t which = shared(memberships_.size());
    const std::vector<int>& ranks = memberships_[which];
    const int n = static_cast<int>(ranks.size());
    const auto kind = static_cast<Call>(shared(8));
    auto dtype = static_cast<Dtype>(shared(9));
    const auto reduction = static_cast<Reduce>(shared(5));
    const bool large = shared(static_cast<uint64_t>(options_.large_every)) == 0;
    size_t count = shared(large ? options_.large_elements : options_.max_elements);
    if (shared(10) == 0) count = shared(3);
    const int root = static_cast<int>(shared(static_cast<uint64_t>(n)));
    const int sink = static_cast<int>(shared(static_cast<uint64_t>(n)));
    const uint64_t split_seed = shared(1u << 30);
    const auto mine = std::find(ranks.begin(), ranks.end(), engine_.rank());
    if (mine == ranks.end()) return;
    const int me = static_cast<int>(mine - ranks.begin());
    if (kind == Call::message && (root == sink || (me != root && me != sink))) return;

    Pending p;
    p.op = std::make_shared<Op>();
    Op& op = *p.op;
    op.call = kind;
    op.dtype = dtype;
    op.timeout = kDeadline;
    op.count = kind == Call::barrier ? 0 : count;
    op.bytes = op.count * element_size(dtype);
    if (kind == Call::all_reduce || kind == Call::reduce || kind == Call::reduce_scatter) op.reduction = reduction;
    if (kind == Call::reduce || kind == Call::broadcast) op.root = root;
    p.text = std::string(name_of(kind)) + " " + std::string(name_of(dtype)) + " " + std::string(name_of(reduction)) + " count " +
             std::to_string(count) + " call " + std::to_string(call) + " rank " + std::to_string(engine_.rank());
    group_ = 0;
    for (size_t g = 0, joined = 0; g < which + 1; ++g) {
      const auto& set = memberships_[g];
      if (std::find(set.begin(), set.end(), engine_.rank()) == set.end()) continue;
      if (g == which) group_ = joined;
      ++joined;
    }
    prepare(p, ranks, me, call, count, root, split_seed, reduction);
    Lane* lane = &groups_[group_]->collectives();
    if (kind == Call::message) lane = me == root ? &groups_[group_]->outgoing(sink) : &groups_[group_]->incoming(root);
    engine_.start(*lane, p.op);
    pending_.push_back(std::move(p));
  }

  Buffer buffer(size_t bytes) {
    Buffer b;
    const size_t capacity = blocks_[group_]->slot_bytes;
    size_t& used = block_used_[group_];
    const size_t odd = own(8) * 8;  // any alignment of elements
    if (own(2) == 0 && used + bytes + odd <= capacity) {
      b.data = blocks_[group_]->mine + used + odd;
      used += (bytes + odd + 63) / 64 * 64;
    } else {
      b.owned.resize(bytes + 8);
      b.data = b.owned.data();
    }
    return b;
  }

  std::vector<char> filled(size_t elements, Dtype dtype, const std::function<double(size_t)>& at) const {
    const size_t size = element_size(dtype);
    std::vector<char> bytes(elements * size);
    for (size_t i = 0; i < elements; ++i) put(bytes.data() + i * size, dtype, at(i));
    return bytes;
  }

  static uint64_t split(uint64_t seed, int from, int to, size_t count) {
    return (seed + static_cast<uint64_t>(from) * 31 + static_cast<uint64_t>(to) * 17) * 2654435761u % (count + 1);
  }

  void prepare(Pending& p, const std::vector<int>& ranks, int me, uint64_t call, size_t count, int root, uint64_t split_seed, Reduce reduction) {
    Op& op = *p.op;
    const size_t n = ranks.size();
    const size_t size = element_size(op.dtype);
    const Reduce r = op.reduction;
    const int self = ranks[static_cast<size_t>(me)];
    const auto own_value = [&](size_t i) { return static_cast<double>(value(call, self, i, r)); };
    std::vector<char> input;
    switch (op.call) {
      case Call::barrier: return;
      case Call::all_reduce:
      case Call::reduce:
        input = filled(count, op.dtype, own_value);
        if (op.call == Call::all_reduce || me == root) {
          p.expected = filled(count, op.dtype, [&](size_t i) { return combined(ranks, call, i, r, op.dtype); });
        }
        break;
      case Call::broadcast:
      case Call::message: {
        const int from = ranks[static_cast<size_t>(root)];
        const auto at = [&](size_t i) { return static_cast<double>(value(call, from, i, r)); };
        if (me == root) input = filled(count, op.dtype, at);
        else input.assign(count * size, 'x');
        if (me != root) p.expected = filled(count, op.dtype, at);
        break;
      }
      case Call::all_gather:
        input = filled(count, op.dtype, own_value);
        for (int from : ranks) {
          auto part = filled(count, op.dtype, [&](size_t i) { return static_cast<double>(value(call, from, i, r)); });
          p.expected.insert(p.expected.end(), part.begin(), part.end());
        }
        break;
      case Call::reduce_scatter:
        input = filled(count * n, op.dtype, own_value);
        p.expected = filled(count, op.dtype, [&](size_t i) { return combined(ranks, call, static_cast<size_t>(me) * count + i, r, op.dtype); });
        break;
      case Call::all_to_all:
        op.count = 0;
        op.bytes = 0;
        for (int other = 0; other < static_cast<int>(n); ++other) {
          const uint64_t out = split(split_seed, me, other, count), in = split(split_seed, other, me, count);
          op.send_bytes.push_back(out * size);
          op.receive_bytes.push_back(in * size);
          auto part = filled(out, op.dtype, [&](size_t i) { return static_cast<double>(value(call, self, i + static_cast<size_t>(other) * 7, r)); });
          input.insert(input.end(), part.begin(), part.end());
          auto got = filled(in, op.dtype, [&](size_t i) {
            return static_cast<double>(value(call, ranks[static_cast<size_t>(other)], i + static_cast<size_t>(me) * 7, r));
          });
          p.expected.insert(p.expected.end(), got.begin(), got.end());
        }
        break;
    }
    p.input = buffer(input.size());
    std::copy(input.begin(), input.end(), p.input.data);
    op.input = p.input.data;
    op.output = p.input.data;
    const bool apart = op.call == Call::all_gather || op.call == Call::all_to_all || (op.call == Call::reduce_scatter && own(2) == 0);
    if (apart) {
      p.output = buffer(p.expected.size());
      std::memset(p.output.data, 'y', p.expected.size());
      op.output = p.output.data;
    } else if (op.call == Call::reduce_scatter) {
      op.output = p.input.data + static_cast<size_t>(me) * op.bytes;  // in place
    }
    p.checked = op.output;
    (void)reduction;
  }

  void finish(size_t index) {
    Pending p = std::move(pending_[index]);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(index));
    if (own(3) == 0) engine_.wait(*p.op, Until::complete, {});
    else if (own(2) == 0) while (!engine_.test(*p.op, Until::complete)) std::this_thread::yield();
    else engine_.wait(*p.op, Until::released, {});
    const bool equal = p.expected.empty() || std::memcmp(p.checked, p.expected.data(), p.expected.size()) == 0;
    if (!equal) {
      size_t first = 0;
      while (p.checked[first] == p.expected[first]) ++first;
      ADD_FAILURE() << p.text << ": wrong from byte " << first << " of " << p.expected.size();
      throw std::runtime_error("wrong result: " + p.text);
    }
    engine_.wait(*p.op, Until::released, {});
    // Now nobody may read the memory any more: spoil it at once.
    const size_t bytes = input_bytes(*p.op);
    if (p.input.data != nullptr) std::memset(p.input.data, 0x5a, bytes);
    if (pending_.empty()) std::fill(block_used_.begin(), block_used_.end(), size_t{0});
  }

  size_t input_bytes(const Op& op) const {
    size_t bytes = op.bytes;
    if (op.call == Call::reduce_scatter) bytes *= op.lane->group().world_ranks.size();
    for (uint64_t part : op.send_bytes) bytes += part;
    return bytes;
  }

  Engine& engine_;
  Options options_;
  std::mt19937_64 shared_random_, own_random_;
  std::vector<std::vector<int>> memberships_;
  std::vector<std::shared_ptr<Group>> groups_;         // those of memberships_ that this rank is in
  std::vector<std::shared_ptr<SharedBlock>> blocks_;   // one per group
  std::vector<size_t> block_used_;
  std::deque<Pending> pending_;
  size_t group_ = 0;
};

/// Runs fn(engine) on n threads, each a rank; a failure of one aborts the others and is rethrown.
inline void on_threads(int n, const std::function<void(Engine&)>& fn) {
  auto engines = Engine::in_process(n);
  std::vector<std::exception_ptr> failures(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      std::shared_ptr<Engine> engine = std::move(engines[static_cast<size_t>(r)]);
      try {
        fn(*engine);
      } catch (const std::exception& error) {
        failures[static_cast<size_t>(r)] = std::current_exception();
        engine->abort(RankSet().set(static_cast<size_t>(r)), error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace weft::local::stress

#include "weft/memory/allocation_probe.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>

#include "weft/core/error.h"

namespace weft::memory {
namespace {

struct Refused {};

struct Requests {
  bool refuse = false;
  int64_t asked = 0;
  RequestCount count;
};
thread_local Requests* counting = nullptr;

void add(RequestCount& count, int64_t bytes) {
  count.live += bytes;
  count.peak = std::max(count.peak, count.live);
  count.total += bytes;
  ++count.blocks;
}

/// Lies before every block's data.
struct alignas(64) Header {
  int64_t bytes;
};

/// Serves the thread that probes; others are passed on.
class Probe final : public c10::Allocator {
 public:
  explicit Probe(c10::Allocator* other) : other_(other) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (counting == nullptr) return other_->allocate(bytes);
    const auto size = static_cast<int64_t>(bytes);
    if (counting->refuse && size > 0) {
      counting->asked = size;
      throw Refused{};
    }
    void* block = std::aligned_alloc(alignof(Header), (sizeof(Header) + bytes + alignof(Header) - 1) / alignof(Header) * alignof(Header));
    if (block == nullptr) throw std::bad_alloc();
    auto* header = new (block) Header{size};
    add(counting->count, size);
    return {header + 1, header + 1, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return counting == nullptr ? other_->raw_deleter() : &free_block; }
  void copy_data(void* target, const void* source, size_t bytes) const override { default_copy_data(target, source, bytes); }

 private:
  static void free_block(void* data) {
    if (data == nullptr) return;
    auto* header = static_cast<Header*>(data) - 1;
    if (counting != nullptr) counting->count.live -= header->bytes;
    std::free(header);
  }

  c10::Allocator* other_;
};

/// The same for meta tensors, which have no memory.
class MetaProbe final : public c10::Allocator {
 public:
  explicit MetaProbe(c10::Allocator* other) : other_(other) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (counting == nullptr) return other_->allocate(bytes);
    const auto size = static_cast<int64_t>(bytes);
    add(counting->count, size);
    return {nullptr, new int64_t(size), &forget, c10::Device(c10::kMeta)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}

 private:
  static void forget(void* context) {
    const std::unique_ptr<int64_t> size(static_cast<int64_t*>(context));
    if (counting != nullptr) counting->count.live -= *size;
  }

  c10::Allocator* other_;
};

/// Ours for the time of one call. The object stays: another thread may be inside of it.
class Installed {
 public:
  explicit Installed(Requests* requests, c10::DeviceType device = c10::kCPU) : lock_(mutex()), device_(device), before_(c10::GetAllocator(device)) {
    if (device == c10::kMeta) c10::SetAllocator(device, new MetaProbe(before_));
    else c10::SetAllocator(device, new Probe(before_));
    counting = requests;
  }
  ~Installed() {
    counting = nullptr;
    c10::SetAllocator(device_, before_);
  }
  Installed(const Installed&) = delete;
  Installed& operator=(const Installed&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  std::lock_guard<std::mutex> lock_;
  c10::DeviceType device_;
  c10::Allocator* before_;
};

}  // namespace

int64_t first_request(const std::function<void()>& call) {
  Requests requests{.refuse = true};
  const Installed installed(&requests);
  try {
    call();
  } catch (const Refused&) {
  }
  return requests.asked;
}

struct RequestCounter::State {
  explicit State(c10::DeviceType device) : installed(&requests, device) {}
  Requests requests;
  Installed installed;
};

RequestCounter::RequestCounter(c10::DeviceType device) : state_(std::make_unique<State>(device)) {}
RequestCounter::~RequestCounter() = default;
RequestCount RequestCounter::now() const { return state_->requests.count; }

at::Tensor untouched(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  size_t elements = 1;
  for (size_t d = 0; d < sizes.size(); ++d) elements += static_cast<size_t>(std::max<int64_t>(0, sizes[d] - 1) * strides[d]);
  const size_t bytes = elements * c10::elementSize(dtype);
  void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw InternalError("no address space to find out what a kernel needs");
  return at::from_blob(pages, sizes, strides, [bytes](void* data) { ::munmap(data, bytes); }, at::TensorOptions(dtype));
}

}  // namespace weft::memory

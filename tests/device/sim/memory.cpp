// Device memory and pinned memory, both of the host, and the accesses to them that nothing orders.
#include "sim.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <unordered_map>

namespace sim {
namespace {

constexpr uintptr_t kTag = uintptr_t(1) << 55;

void* tagged(const void* pointer) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) | kTag);
}

std::string lane_name(int lane) {
  if (lane == kHost) return "the host";
  const int stream = lane % kStreams;
  return "sim:" + std::to_string(lane / kStreams) +
         (stream == kCollectives ? " collectives" : " stream " + std::to_string(stream));
}

bool is_over(int lane, uint64_t when, int for_lane) { return when <= clock_of(for_lane)[lane]; }

// -- blocks ------------------------------------------------------------------------------------------

struct Block {
  c10::DeviceIndex device = 0;
  size_t bytes = 0;
  int owner = 0;  // the lane that was current when it was allocated
  int writer = kHost;
  uint64_t written = 0;
  std::map<int, uint64_t> last_use;  // by lane
  std::set<int> recorded;            // lanes that record_stream has named
};
std::unordered_map<uintptr_t, Block> blocks;  // by address, without the tag

struct Use {  // of a block that has been freed
  int owner, lane;
  uint64_t when;
};
std::vector<Use> unfinished;

struct Account {
  int64_t held = 0, peak = 0, limit = setting("SIM_MEMORY_MB", int64_t(1) << 20) << 20;
};
std::array<Account, kMaxDevices> accounts;

Block* block_at(const void* pointer) {
  auto place = blocks.find(reinterpret_cast<uintptr_t>(real(pointer)));
  return place == blocks.end() ? nullptr : &place->second;
}

// The owner's stream gets freed memory again at once, as from a caching allocator.
void check_reuse(int owner) {
  auto is_checked = [&](const Use& use) {
    if (use.owner != owner) return false;
    if (!is_over(use.lane, use.when, owner) && !is_over(use.lane, use.when, kHost))
      report(lane_name(owner) + " gets memory that was freed while " + lane_name(use.lane) +
             " may use it still: record_stream, or wait before it is freed");
    return true;
  };
  unfinished.erase(std::remove_if(unfinished.begin(), unfinished.end(), is_checked), unfinished.end());
}

void enter(c10::DeviceIndex device, void* address, size_t bytes) {
  std::lock_guard lock(mutex);
  const int owner = current_lane(device);
  check_reuse(owner);
  Block block;
  block.device = device, block.bytes = bytes, block.owner = owner;
  blocks[reinterpret_cast<uintptr_t>(address)] = block;
  auto& account = accounts[device];
  account.held += int64_t(bytes);
  account.peak = std::max(account.peak, account.held);
}

void remove(void* address) {
  std::lock_guard lock(mutex);
  auto place = blocks.find(reinterpret_cast<uintptr_t>(address));
  if (place == blocks.end()) return;
  const auto& block = place->second;
  for (const auto& [lane, when] : block.last_use)
    if (lane != block.owner && !block.recorded.count(lane)) unfinished.push_back({block.owner, lane, when});
  accounts[block.device].held -= int64_t(block.bytes);
  blocks.erase(place);
}

void free_own(void* address) {
  remove(address);
  std::free(address);
}

struct Adopted {
  c10::Storage storage;
};
void free_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  remove(adopted->storage.mutable_data());
  delete adopted;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDevice, current_device);
    if (!bytes) return {nullptr, device};
    refuse_fork();
    note_use();
    check_room(current_device, bytes);
    void* address = nullptr;
    TORCH_CHECK(!posix_memalign(&address, 64, bytes), "the host has no memory for the stand-in device");
    std::memset(address, 0xFF, bytes);  // NaN, -1, True
    enter(current_device, address, bytes);
    return {tagged(address), address, &free_own, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(real(to), real(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, lane_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* entry : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes})
      (*entry)[0].current = bytes_held(device), (*entry)[0].peak = bytes_at_peak(device);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
} device_memory;
REGISTER_ALLOCATOR(kDevice, &device_memory);

// -- pinned memory -----------------------------------------------------------------------------------

std::map<uintptr_t, size_t> pinned;  // size by address

struct Extent {  // the memory between a tensor's first element and its last
  char* begin;
  size_t bytes;
  explicit Extent(const at::Tensor& tensor) : begin(static_cast<char*>(tensor.data_ptr())), bytes(tensor.itemsize()) {
    for (int64_t dim = 0; dim < tensor.dim(); dim++)
      bytes += size_t((tensor.size(dim) - 1) * tensor.stride(dim)) * tensor.itemsize();
  }
  Extent(void* address, size_t size) : begin(static_cast<char*>(address)), bytes(size) {}
};

struct Piece {
  size_t offset, bytes;
};

// What of its extent is a tensor's: all of it where it has no gaps, and else each element.
std::vector<Piece> pieces_of(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return {{0, tensor.nbytes()}};
  std::vector<Piece> pieces{{0, size_t(tensor.itemsize())}};
  for (int64_t dim = 0; dim < tensor.dim(); dim++) {
    const auto row = std::exchange(pieces, {});
    for (int64_t i = 0; i < tensor.size(dim); i++)
      for (const auto& piece : row)
        pieces.push_back({piece.offset + size_t(i * tensor.stride(dim)) * tensor.itemsize(), piece.bytes});
  }
  return pieces;
}

struct Copy {
  Extent host;
  std::vector<Piece> pieces;
  std::vector<char> numbers;  // to arrive on the host; or as they were when the copy was started
  bool to_host;
  int lane;
  uint64_t when;
  bool overlaps(const Extent& other) const {
    return host.begin < other.begin + other.bytes && other.begin < host.begin + host.bytes;
  }
  bool is_of_changed_source() const {
    return !to_host && std::any_of(pieces.begin(), pieces.end(), [this](const Piece& piece) {
      return std::memcmp(host.begin + piece.offset, numbers.data() + piece.offset, piece.bytes);
    });
  }
};
std::deque<Copy> copies;

void finish(const Copy& copy) {
  if (copy.is_of_changed_source())
    report("the host changed pinned memory while " + lane_name(copy.lane) + " was copying it");
  for (const auto& [offset, bytes] : copy.pieces)
    if (copy.to_host) std::memcpy(copy.host.begin + offset, copy.numbers.data() + offset, bytes);
}

template <class Condition>
void finish_where(Condition condition) {
  for (auto copy = copies.begin(); copy != copies.end();) {
    if (!condition(*copy)) {
      ++copy;
      continue;
    }
    finish(*copy);
    copy = copies.erase(copy);
  }
}

void free_pinned(void* address) {
  std::lock_guard lock(mutex);
  const auto place = pinned.find(reinterpret_cast<uintptr_t>(address));
  finish_where([&](const Copy& copy) { return copy.overlaps({address, place->second}); });
  pinned.erase(place);
  std::free(address);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    const size_t size = std::max<size_t>(bytes, 1);
    TORCH_CHECK(!posix_memalign(&address, 64, size), "the host has no memory to pin");
    std::memset(address, 0xFF, size);
    std::lock_guard lock(mutex);
    pinned[reinterpret_cast<uintptr_t>(address)] = size;
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;
REGISTER_HOST_ALLOCATOR(kDevice, &pinned_memory);

}  // namespace

char* real(const void* pointer) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(pointer) & ~kTag);
}

at::Allocator* device_allocator() { return &device_memory; }
at::Allocator* pinned_allocator() { return &pinned_memory; }

void record_stream(const c10::DataPtr& data, int lane) {
  std::lock_guard lock(mutex);
  if (auto* block = block_at(data.get())) block->recorded.insert(lane);
}

void resize(const c10::Storage& storage, size_t bytes) {
  const auto before = std::exchange(current_device, storage.device().index());
  auto data = device_memory.allocate(bytes);
  current_device = before;
  if (data.get() && storage.data())
    std::memcpy(real(data.get()), real(storage.data()), std::min(bytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

c10::Storage adopt(const c10::Storage& cpu, c10::DeviceIndex device) {
  void* address = cpu.mutable_data();
  const c10::Device place(kDevice, device);
  const auto size = c10::Storage::use_byte_size_t();
  if (!address) return c10::Storage(size, 0, c10::DataPtr(nullptr, place), &device_memory, true);
  check_room(device, cpu.nbytes());
  enter(device, address, cpu.nbytes());
  c10::DataPtr data(tagged(address), new Adopted{cpu}, &free_adopted, place);
  return c10::Storage(size, cpu.nbytes(), std::move(data), &device_memory, true);
}

void note_access(const at::Tensor& tensor, int lane, uint64_t when, bool writes) {
  if (!tensor.defined() || !tensor.is_privateuseone() || !tensor.nbytes()) return;
  std::lock_guard lock(mutex);
  auto* block = block_at(tensor.storage().data());
  if (!block) return;
  auto is_unordered = [&](int other, uint64_t moment) {
    return other != lane && other != kHost && !is_over(other, moment, lane);
  };
  if (is_unordered(block->writer, block->written))
    report(lane_name(lane) + (writes ? " overwrites" : " reads") + " what " + lane_name(block->writer) +
           " writes; nothing orders the two");
  if (writes)
    for (const auto& [other, moment] : block->last_use)
      if (is_unordered(other, moment) && !(other == block->writer && moment == block->written))
        report(lane_name(lane) + " overwrites what " + lane_name(other) + " reads; nothing orders the two");
  block->last_use[lane] = when;
  if (writes) block->writer = lane, block->written = when;
}

bool is_pinned(const void* pointer) {
  std::lock_guard lock(mutex);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) return false;
  const auto& [begin, size] = *std::prev(after);
  return address < begin + size;
}

void deliver_copies() {
  finish_where([](const Copy& copy) { return is_over(copy.lane, copy.when, kHost); });
}

void report_changed_sources() {
  std::lock_guard lock(mutex);
  finish_where([](const Copy& copy) { return copy.is_of_changed_source(); });
}

void order_copies(const at::Tensor& host, int lane) {
  if (!host.numel()) return;
  std::lock_guard lock(mutex);
  const Extent extent(host);
  finish_where([&](const Copy& copy) {
    return copy.overlaps(extent) && (copy.lane == lane || is_over(copy.lane, copy.when, lane));
  });
  for (const auto& copy : copies)
    if (copy.to_host && copy.overlaps(extent))
      report(lane_name(lane) + " copies pinned memory that " + lane_name(copy.lane) +
             " is writing; nothing orders the two");
}

void start_copy(const at::Tensor& host, const at::Tensor& numbers, bool to_host, int lane, uint64_t when) {
  std::lock_guard lock(mutex);
  const Extent extent(host), sent(numbers);
  const auto pieces = pieces_of(host);
  copies.push_back({extent, pieces, std::vector<char>(sent.begin, sent.begin + sent.bytes), to_host, lane, when});
  for (const auto& [offset, bytes] : pieces)
    if (to_host) std::memset(extent.begin + offset, 0xFF, bytes);
}

int64_t bytes_held(c10::DeviceIndex device) { return accounts[device].held; }
int64_t bytes_at_peak(c10::DeviceIndex device) { return accounts[device].peak; }
void reset_peak(c10::DeviceIndex device) { accounts[device].peak = accounts[device].held; }
void set_limit(c10::DeviceIndex device, int64_t bytes) { accounts[device].limit = bytes; }

void check_room(c10::DeviceIndex device, size_t bytes) {
  std::lock_guard lock(mutex);
  const auto& account = accounts[device];
  TORCH_CHECK_WITH(OutOfMemoryError, account.held + int64_t(bytes) <= account.limit,
                   "sim out of memory. Tried to allocate ", bytes, " bytes. sim:", int(device), " has ",
                   account.limit, " bytes, of which ", account.held, " are in use");
}

}  // namespace sim

// Devices, streams, events and generators, as torch asks for them.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>

namespace sim {
namespace {

// -- generators: the CPU's, one for each device ------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  at::Generator inner;
  // As a GPU's: numbers follow from a seed and an offset, which are the whole state, and DTensors
  // count on that. They are not the CPU's then.
  static bool counts() { return setting("SIM_COUNTED_RANDOM", 0) != 0; }
  uint64_t chosen = c10::default_rng_seed_val, offset = 0;
  void begin_operation() {
    if (!counts()) return;
    inner.set_current_seed((chosen * 0x9E3779B97F4A7C15u + offset * 0xBF58476D1CE4E5B9u) >> 32);
    offset += 4;
  }
  c10::GeneratorImpl* impl() const { return inner.unsafeGetGeneratorImpl(); }
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
    chosen = seed, offset = 0;
  }
  void set_offset(uint64_t value) override { offset = value; }
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return counts() ? chosen : inner.current_seed(); }
  uint64_t seed() override { return impl()->seed(); }
  void set_state(const c10::TensorImpl& state) override {
    if (!counts()) return impl()->set_state(state);
    TORCH_CHECK(state.numel() == 16, "sim: a state of ", state.numel(), " bytes; a counted one has 16");
    const auto* bytes = static_cast<const uint64_t*>(state.data());
    chosen = bytes[0], offset = bytes[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    if (!counts()) return impl()->get_state();
    auto state = at::empty({16}, at::TensorOptions(at::kByte).device(at::kCPU));
    auto* bytes = static_cast<uint64_t*>(state.mutable_data_ptr());
    bytes[0] = chosen, bytes[1] = offset;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* other = new Generator(device().index());
    other->inner = inner.clone();
    other->chosen = chosen, other->offset = offset;
    return other;
  }
};

// -- streams and events ------------------------------------------------------------------------------

struct Event {
  Clock clock{};
  Time::time_point moment, end;  // when it was recorded, and when what is before it is over
  bool was_queried = false;
};

std::array<std::atomic<int>, kMaxDevices> streams_made{};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  static c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(device_count()); }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < device_count(), "sim: invalid device ordinal ", int(device.index()));
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const noexcept override {
    return stream_of(index_of(device), current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    const auto index = index_of(device);
    return stream_of(index, 1 + streams_made[index]++ % (kCollectives - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = int(stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return host_has_seen(clock_of(lane_of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits_for(clock_of(lane_of(stream))); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Clock all{};
    for (int number = 0; number < kStreams; number++) {
      const auto clock = clock_of(lane_of(stream_of(device < 0 ? current_device : device, number)));
      for (size_t lane = 0; lane < all.size(); lane++) all[lane] = std::max(all[lane], clock[lane]);
    }
    host_waits_for(all);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    auto* ours = static_cast<Event*>(*event);
    begin(lane_of(stream));
    const auto clock = clock_of(lane_of(stream));
    *ours = {clock, Time::now(), end_of(clock), false};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) advance(lane_of(stream), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    tell_fault();
    auto* ours = static_cast<Event*>(event);
    if (!ours || host_has_seen(ours->clock)) return true;
    if (!std::exchange(ours->was_queried, true)) return false;  // never over at the first look
    if (Time::now() < ours->end) return false;
    host_hears_of(ours->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (const auto* ours = static_cast<Event*>(event)) host_waits_for(ours->clock, ours->end);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    auto *begin = static_cast<Event*>(first), *end = static_cast<Event*>(second);
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(host_has_seen(begin->clock) && host_has_seen(end->clock),
                "elapsed_time before both events are over: device not ready");
    return std::chrono::duration<double, std::milli>(end->moment - begin->moment).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, lane_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kDevice, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kDevice, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize(storage, bytes); }
} hooks;

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device : device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto generators = [] {
    std::vector<at::Generator> all;
    for (int index = 0; index < device_count(); index++) all.push_back(new_generator(c10::DeviceIndex(index)));
    return all;
  }();
  return generators.at(device < 0 ? current_device : device);
}

at::Generator inner_generator(const at::Generator& generator) {
  auto* impl = generator.get<Generator>();
  impl->begin_operation();
  return impl->inner;
}

void register_hooks() { at::RegisterPrivateUse1HooksInterface(&hooks); }

}  // namespace sim

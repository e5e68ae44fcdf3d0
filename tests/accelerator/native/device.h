// The device: its memory, pinned memory of the host, streams and events, random numbers.
#pragma once

#include "clocks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace simulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
constexpr int kPoison = 0xFF;  // in every byte: NaN, -1 or true
constexpr size_t kTotalBytes = size_t(1) << 34;

// ---------------------------------------------------------------- memory
struct Bytes {  // of one device
  int64_t now = 0, peak = 0, made = 0;
  bool watched = false;  // whether what is alive at the peak is noted
  std::unordered_set<Allocation*> alive;
  std::vector<std::pair<int64_t, Place>> at_peak;

  void rose(Allocation* memory) {  // with the mutex held
    now += (int64_t)memory->bytes;
    made += (int64_t)memory->bytes;
    alive.insert(memory);
    if (now <= peak) return;
    peak = now;
    if (!watched) return;
    at_peak.clear();
    for (auto one : alive) at_peak.emplace_back((int64_t)one->bytes, one->place);
  }
};
inline std::array<Bytes, kMostDevices>& bytes_of = *new std::array<Bytes, kMostDevices>;

inline void* aligned(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 64)) == 0, "the simulated accelerator is out of memory");
  return data;
}

inline void free_allocation(void* context) {
  auto memory = static_cast<Allocation*>(context);
  {
    Lock lock(world.mutex);
    leave_tombstones(*memory);
    bytes_of[memory->device].now -= (int64_t)memory->bytes;
    bytes_of[memory->device].alive.erase(memory);
  }
  if (!memory->adopted) std::free(memory->data);
  delete memory;
}

// Makes memory a device's, as an allocation on its current stream: fresh memory, or what a kernel of the CPU has allocated.
inline c10::DataPtr own(void* data, size_t bytes, int device, c10::Storage adopted = {}) {
  auto memory = new Allocation;
  memory->data = data;
  memory->bytes = bytes;
  memory->device = device;
  memory->slot = current_slot(device);
  memory->place = place_here();
  memory->adopted = std::move(adopted);
  Lock lock(world.mutex);
  memory->born = ++world.allocations;
  bytes_of[device].rose(memory);
  return {data, memory, &free_allocation, c10::Device(kDevice, (c10::DeviceIndex)device)};
}

inline Allocation* allocation_of(const c10::DataPtr& data) {  // null: not memory of the device
  return data.get_deleter() == &free_allocation ? static_cast<Allocation*>(data.get_context()) : nullptr;
}

inline void record_stream_of(const c10::DataPtr& data, const c10::Stream& stream) {
  if (order_is_ignored("record_stream")) return;
  Lock lock(world.mutex);
  if (auto memory = allocation_of(data)) memory->recorded.insert(slot_of(stream));
}

// torch.accelerator's memory functions refuse an allocator that is not a c10::DeviceAllocator.
struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = aligned(bytes);
    std::memset(data, kPoison, bytes);
    return own(data, bytes, current_device);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream_of(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto& all = bytes_of[device];
    for (auto kind : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*kind)[0].current = all.now;
      (*kind)[0].peak = all.peak;
      (*kind)[0].allocated = all.made;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { bytes_of[device].made = 0; }
  void resetPeakStats(c10::DeviceIndex device) override { bytes_of[device].peak = bytes_of[device].now; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {kTotalBytes - bytes_of[device].now, kTotalBytes};
  }
};
inline Allocator& allocator = *new Allocator;

// ---------------------------------------------------------------- pinned memory of the host
inline std::map<const char*, size_t>& pinned = *new std::map<const char*, size_t>;

inline void free_pinned(void* data) {
  Lock lock(world.mutex);
  pinned.erase(static_cast<const char*>(data));
  std::free(data);
}

inline bool is_pinned(const void* data) {
  Lock lock(world.mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto& [begin, bytes] = *std::prev(after);
  return static_cast<const char*>(data) < begin + bytes;
}

// Copies keep their pinned tensors until the host knows that they have ended, so this needs no events of its own.
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = aligned(bytes);
    Lock lock(world.mutex);
    pinned[static_cast<const char*>(data)] = std::max<size_t>(bytes, 1);
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator& pinned_allocator = *new PinnedAllocator;

// ---------------------------------------------------------------- streams and events
struct Event {
  Clock clock;
  int slot;
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, (c10::DeviceIndex)device), id);
  }
  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return (c10::DeviceIndex)world.devices; }
  c10::Device getDevice() const override { return {kDevice, (c10::DeviceIndex)current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < world.devices, device, ": there are ", world.devices, " devices");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const override { return stream(index(device), current_streams[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(index(device), new_slot()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {  // always done, as if the device had caught up: the host learns
    Clock clock;
    {
      Lock lock(world.mutex);
      clock = world.streams[slot_of(stream)];
    }
    host_learns(clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits("stream.synchronize", slot_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    // Of all devices: streams do not say which device they are of, and a process works on one.
    Clock all;
    {
      Lock lock(world.mutex);
      for (auto& clock : world.streams) all.join(clock);
    }
    host_waits("synchronize", all);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(world.mutex);
    if (!*event) *event = new Event;
    world.streams[slot_of(stream)].join(world.host);
    *static_cast<Event*>(*event) = {world.streams[slot_of(stream)], slot_of(stream), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event || order_is_ignored("event")) return;
    Lock lock(world.mutex);
    world.streams[slot_of(stream)].join(static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event) host_learns(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* given) const override {
    if (!given) return;
    const auto event = static_cast<Event*>(given);
    bool known, has_more;
    {
      Lock lock(world.mutex);
      const auto epoch = event->clock.of(event->slot);
      known = world.host.has(event->slot, epoch);
      has_more = world.streams[event->slot].has(event->slot, epoch + 1);
    }
    host_learns(event->clock);
    if (!known) report(has_more ? "behind" : "wait", "event.synchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream_of(data, stream);
  }
};
inline Guard& guard = *new Guard;

// ---------------------------------------------------------------- random numbers
// A seed and an offset, as Philox has them: DTensor's tracker reads and writes them in the state's 16 bytes.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Generator(int device) : GeneratorImpl({kDevice, (c10::DeviceIndex)device}, c10::DispatchKeySet(kKey)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "the state of a generator is 16 bytes on the CPU");
    auto words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  at::Generator of_next_kernel() {  // of the CPU, seeded by a hash of seed and offset
    uint64_t hash = seed_ ^ (offset_ * 0x9E3779B97F4A7C15ull);
    hash ^= hash >> 31;
    hash *= 0xBF58476D1CE4E5B9ull;
    hash ^= hash >> 29;
    offset_ += 4;
    return at::detail::createCPUGenerator(hash);
  }
};

inline const at::Generator& default_generator(int device) {
  static auto& all = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (int index = 0; index < kMostDevices; index++) made.push_back(at::make_generator<Generator>(index));
    return made;
  }());
  return all[device < 0 ? current_device : device];
}
inline at::Generator of_next_kernel(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->of_next_kernel();
}

// ---------------------------------------------------------------- what torch.accelerator asks
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return world.devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return guard.deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { guard.setDevice({kDevice, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return (c10::DeviceIndex)current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return guard.exchangeDevice({kDevice, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};

}  // namespace simulated

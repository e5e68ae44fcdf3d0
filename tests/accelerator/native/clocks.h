// Clocks: which access is ordered after which, what the host knows, and where each thing was asked for.
// The words (slot, epoch, clock, tombstone, pending) are explained at the top of ../module.py.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace py = pybind11;
using at::Tensor;

namespace simulated {

constexpr int kMostDevices = 16;
constexpr int kHost = 0;  // the host's slot; default streams follow, one a device, then streams as they are made

struct Clock {
  std::vector<uint64_t> epochs;  // by slot: the last epoch that is known to have ended before
  double time = 0;               // seconds on the timeline: when all of that has ended

  bool has(int slot, uint64_t epoch) const { return slot < (int)epochs.size() && epochs[slot] >= epoch; }
  uint64_t& of(int slot) {
    if (slot >= (int)epochs.size()) epochs.resize(slot + 1, 0);
    return epochs[slot];
  }
  void join(const Clock& other) {
    if (other.epochs.size() > epochs.size()) epochs.resize(other.epochs.size(), 0);
    for (size_t slot = 0; slot < other.epochs.size(); slot++) epochs[slot] = std::max(epochs[slot], other.epochs[slot]);
    time = std::max(time, other.time);
  }
};

using Place = const std::string*;  // a place in Python, or a node of the backward; interned, never freed

struct Access {
  int64_t begin, end;  // bytes of the allocation
  int slot;
  uint64_t epoch;
  bool write;
  const char* operation;
  Place place;
};

struct Allocation {
  void* data = nullptr;
  size_t bytes = 0;
  int device = 0;
  int slot = 0;       // the stream that it is given back to
  uint64_t born = 0;  // on the count of allocations and frees
  Place place = nullptr;
  std::vector<Access> accesses;
  std::unordered_set<int> recorded;  // slots that `record_stream` named
  c10::Storage adopted;              // of the CPU, where the memory is a CPU kernel's
};

struct Tombstone {  // where memory was given back to its stream while another stream might still use it
  Access unfinished;
  uint64_t freed;
  int slot;
  Place allocated;
};

struct Pending {  // what the simulator does when the host learns that an epoch of a stream has ended
  int slot;
  uint64_t epoch;
  std::function<void()> finish;
};

struct Span {  // of an operator or a collective, on the timeline
  int slot;
  std::string name;
  double begin, end;
  bool collective;
  std::string axis;  // of a collective, as the test names it
};

struct Timeline {  // seconds of everything, as a test gives them
  std::function<double(const std::string& name, double flops, double bytes)> operators;
  std::function<std::pair<double, std::string>(const std::string& name, int ranks, double bytes)> collectives;  // and its axis
  double launch;  // of the host, for each
  std::map<int, double> free;  // by slot and by communicator: when the last collective that is settled has ended
  // By communicator and in the order of calls: what settles the begin and the end of a collective. These depend on when the
  // other ranks are ready for it, which is known when this rank waits; and on what stream and communicator have had before: a
  // communicator carries out one thing after another, on whichever streams it is asked for.
  std::map<int, std::map<uint64_t, std::function<void(Timeline&)>>> unsettled;
  uint64_t last = 0;

  void settle(int communicator, uint64_t until) {  // with the mutex held
    auto& waiting = unsettled[communicator];
    while (!waiting.empty() && waiting.begin()->first <= until) waiting.extract(waiting.begin()).mapped()(*this);
  }
  std::vector<Span> spans;
};

struct World {
  // Recursive: memory is freed by whoever drops the last reference, also by a thread that is in here already.
  std::recursive_mutex mutex;
  Clock host;
  std::deque<Clock> streams = std::deque<Clock>(1 + kMostDevices);  // by slot; kHost's is unused
  std::unordered_map<int, std::vector<Tombstone>> tombstones;       // by the slot that got the memory back
  std::map<uint64_t, Pending> pending;                              // in the order in which they were asked for
  uint64_t last_pending = 0;
  uint64_t allocations = 0;
  std::map<std::string, int64_t> counts;
  std::map<std::string, int64_t> orders;    // each order between streams, by kind and place, with how often it was set up
  std::shared_ptr<Timeline> timeline;       // null: nobody asked for one
  std::vector<std::string> ignored_orders;  // a mutation: orders whose text holds one of these are not set up
  int devices = 2;
  bool mixing_raises = true;
  py::object* on_report = nullptr;         // (kind, text) -> None
  std::vector<std::string> foreign_files;  // parts of the names of files that are not the user's
  std::string own_file;                    // the Python module of the simulation

  void stop_time() {  // with the mutex held
    for (auto& clock : streams) clock.time = 0;
    host.time = 0;
  }
};

// Never destroyed. Memory is freed and collectives end until the process does, after the destructors of globals have run; with
// globals that had been destroyed, one process in some thirty ended with a segmentation fault.
inline World& world = *new World;
using Lock = std::lock_guard<std::recursive_mutex>;

inline bool python_lives() { return Py_IsInitialized() && !_Py_IsFinalizing(); }

// ---------------------------------------------------------------- places
struct Frame {
  PyCodeObject* code = nullptr;
  int line = 0;
  bool operator==(const Frame& other) const { return code == other.code && line == other.line; }
  std::string text() const {
    auto path = py::reinterpret_borrow<py::object>((PyObject*)code).attr("co_filename").cast<std::string>();
    auto name = py::reinterpret_borrow<py::object>((PyObject*)code).attr("co_name").cast<std::string>();
    size_t slash = path.size();
    for (int part = 0; part < 3 && slash > 0 && slash != std::string::npos; part++) slash = path.rfind('/', slash - 1);
    if (slash != std::string::npos) path = path.substr(slash + 1);  // its last three parts
    return path + ":" + std::to_string(line) + " " + name;
  }
};

struct PlaceKey {
  Frame inner, outer;
  std::string node;
  bool operator==(const PlaceKey& other) const { return inner == other.inner && outer == other.outer && node == other.node; }
};
struct PlaceHash {
  size_t operator()(const PlaceKey& key) const {
    return std::hash<void*>()(key.inner.code) * 31 + std::hash<void*>()(key.outer.code) + key.inner.line * 977 +
        key.outer.line * 7919 + std::hash<std::string>()(key.node);
  }
};

enum class Whose { kUsers, kForeign, kOwn };

inline Whose whose(PyCodeObject* code) {  // with the GIL
  static auto& known = *new std::unordered_map<PyCodeObject*, Whose>;
  if (auto found = known.find(code); found != known.end()) return found->second;
  Py_INCREF(code);  // its address is a key from now on
  auto path = py::reinterpret_borrow<py::object>((PyObject*)code).attr("co_filename").cast<std::string>();
  auto found = path == world.own_file ? Whose::kOwn : Whose::kUsers;
  for (auto& part : world.foreign_files)
    if (found == Whose::kUsers && path.find(part) != std::string::npos) found = Whose::kForeign;
  return known[code] = found;
}

// Where the host is: its innermost frame that is neither torch's nor the simulator's, and the innermost of all; on a thread of
// autograd, the node that runs. Texts are made once for each place, so that asking costs a microsecond for every operator.
// Never called with the mutex held: a thread that has the GIL may wait for the mutex.
inline Place place_here() {
  static auto& places = *new std::unordered_map<PlaceKey, std::string, PlaceHash>;
  static const std::string nowhere = "no Python frame";
  if (!python_lives()) return &nowhere;
  PlaceKey key;
  if (auto node = torch::autograd::get_current_node()) key.node = node->name();
  py::gil_scoped_acquire gil;
  auto frame = py::reinterpret_borrow<py::object>((PyObject*)PyEval_GetFrame());
  while (frame) {
    auto raw = (PyFrameObject*)frame.ptr();
    auto code = PyFrame_GetCode(raw);
    Py_DECREF(code);  // the frame keeps it
    const auto found = whose(code);
    if (found != Whose::kOwn && !key.inner.code) key.inner = {code, PyFrame_GetLineNumber(raw)};
    if (found == Whose::kUsers) {
      key.outer = {code, PyFrame_GetLineNumber(raw)};
      break;
    }
    frame = py::reinterpret_steal<py::object>((PyObject*)PyFrame_GetBack(raw));
  }
  if (auto found = places.find(key); found != places.end()) return &found->second;
  std::string text = key.node.empty() ? "" : "backward " + key.node;
  for (auto& part : {key.outer, key.outer == key.inner ? Frame() : key.inner})
    if (part.code) text += (text.empty() ? "" : " < ") + part.text();
  return &places.emplace(key, text.empty() ? nowhere : text).first->second;
}

// ---------------------------------------------------------------- reports
inline void report(const std::string& kind, const std::string& text) {  // never with the mutex held
  {
    Lock lock(world.mutex);
    world.counts[kind]++;
  }
  if (!world.on_report || !python_lives()) return;
  py::gil_scoped_acquire gil;
  try {
    (*world.on_report)(kind, text);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("report of the simulated accelerator");
  }
}

// What is found with the mutex held, reported when this is destroyed: declare it before the lock.
struct Findings {
  std::vector<std::pair<std::string, std::string>> found;
  void add(const char* kind, std::string text) { found.emplace_back(kind, std::move(text)); }
  ~Findings() {
    for (auto& [kind, text] : found) report(kind, text);
  }
};

inline std::string text_of(const Access& access) {
  return std::string(access.write ? "write" : "read") + " by " + access.operation + " on stream " +
      std::to_string(access.slot) + " [" + *access.place + "]";
}

// ---------------------------------------------------------------- streams
inline thread_local int current_device = 0;
inline thread_local std::array<int64_t, kMostDevices> current_streams{};

inline int slot_of(int device, int64_t stream) { return stream == 0 ? 1 + device : (int)stream; }
inline int slot_of(const c10::Stream& stream) { return slot_of(stream.device_index(), stream.id()); }
inline int current_slot(int device) { return slot_of(device, current_streams[device]); }
inline int new_slot() {
  Lock lock(world.mutex);
  world.streams.emplace_back();
  return (int)world.streams.size() - 1;
}

// An operation starts on a stream, after all that the host knows to have ended. Returns its epoch. With the mutex held.
inline uint64_t launch(int slot) {
  auto& clock = world.streams[slot];
  clock.join(world.host);
  auto& tombstones = world.tombstones[slot];
  std::erase_if(tombstones, [&](const Tombstone& stone) { return clock.has(stone.unfinished.slot, stone.unfinished.epoch); });
  return ++clock.of(slot);
}

// What has just been launched on a slot takes this time. With the mutex held.
inline void spend(Timeline& timeline, int slot, const char* name, double seconds) {
  auto& clock = world.streams[slot];
  timeline.spans.push_back({slot, name, clock.time, clock.time + seconds, false, ""});
  clock.time += seconds;
  world.host.time += timeline.launch;
}
inline std::shared_ptr<Timeline> timeline_now() {
  Lock lock(world.mutex);
  return world.timeline;
}

// An order between streams is about to be set up. Returns whether a mutation leaves it out. Never with the mutex held.
inline bool order_is_ignored(const char* kind) {
  const std::string order = std::string(kind) + " [" + *place_here() + "]";
  Lock lock(world.mutex);
  world.orders[order]++;
  for (auto& part : world.ignored_orders)
    if (order.find(part) != std::string::npos) return true;
  return false;
}

// ---------------------------------------------------------------- the host
inline void host_learns(const Clock& clock) {  // that all of it has ended
  std::vector<std::function<void()>> due;  // outlives the lock: tensors in it may need the GIL to be freed
  {
    Lock lock(world.mutex);
    world.host.join(clock);
    for (auto item = world.pending.begin(); item != world.pending.end();)
      if (world.host.has(item->second.slot, item->second.epoch)) {
        due.push_back(std::move(item->second.finish));
        item = world.pending.erase(item);
      } else {
        ++item;
      }
  }
  // The end of a collective may need a thread that needs the GIL, to free a tensor.
  std::optional<py::gil_scoped_release> without_gil;
  if (python_lives() && PyGILState_Check()) without_gil.emplace();
  for (auto& finish : due) finish();
}

inline uint64_t when_the_host_learns(int slot, uint64_t epoch, std::function<void()> finish) {
  Lock lock(world.mutex);
  world.pending.emplace(++world.last_pending, Pending{slot, epoch, std::move(finish)});
  return world.last_pending;
}

inline void host_waits(const std::string& what, const Clock& clock) {
  host_learns(clock);
  report("wait", what);
}
inline void host_waits(const std::string& what, int slot) {
  Clock clock;
  {
    Lock lock(world.mutex);
    clock = world.streams[slot];
  }
  host_waits(what, clock);
}

// ---------------------------------------------------------------- accesses
// With the mutex held, as are the two below.
inline void touch(Allocation& memory, const Access& access, Findings& findings) {
  if (access.begin >= access.end) return;
  const auto& clock = world.streams[access.slot];
  for (auto& other : memory.accesses) {
    const bool apart = other.end <= access.begin || access.end <= other.begin;
    if (apart || (!access.write && !other.write) || clock.has(other.slot, other.epoch)) continue;
    findings.add("race", text_of(access) + " is not ordered after the " + text_of(other));
  }
  // The allocator may have handed out, as this memory, bytes that were freed before.
  std::erase_if(world.tombstones[memory.slot], [&](const Tombstone& stone) {
    if (stone.freed > memory.born || clock.has(stone.unfinished.slot, stone.unfinished.epoch)) return false;
    findings.add("race", "reuse of memory: " + text_of(access) + " may overwrite what was freed to stream " +
        std::to_string(stone.slot) + " during the " + text_of(stone.unfinished) +
        " (no record_stream, no wait; allocated [" + *stone.allocated + "])");
    return true;
  });
  // An access need not be kept where a later one covers it, comes after it, and conflicts with whatever it conflicts with.
  std::erase_if(memory.accesses, [&](const Access& other) {
    const bool covered = access.begin <= other.begin && other.end <= access.end;
    return covered && (access.write ? clock.has(other.slot, other.epoch) : !other.write && other.slot == access.slot);
  });
  memory.accesses.push_back(access);
}

// Memory goes back to its stream, which may use it again at once. Other streams' accesses that neither that stream nor the host
// comes after leave tombstones. A report at once would be wrong: FSDP frees the output of a reduce-scatter early, and orders
// its streams before they use that memory again.
inline void leave_tombstones(const Allocation& memory) {
  const auto& clock = world.streams[memory.slot];
  const auto freed = ++world.allocations;
  for (auto& access : memory.accesses) {
    if (memory.recorded.count(access.slot)) continue;
    if (clock.has(access.slot, access.epoch) || world.host.has(access.slot, access.epoch)) continue;
    world.tombstones[memory.slot].push_back({access, freed, memory.slot, memory.place});
  }
}

}  // namespace simulated

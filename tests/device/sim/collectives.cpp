// Collectives: Gloo's, over the same bytes, in a thread, in a stream of their own as NCCL's are.
#include "sim.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::OpType;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

struct SimWork final : Work {
  SimWork(int rank, OpType type, Tensors reads, Tensors writes, c10::DeviceIndex device)
      : Work(rank, type), reads_(std::move(reads)), results_(std::move(writes)), device_(device), lane_(device * kStreams + kCollectives) {
    const c10::Device place(kDevice, device);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector<c10::Device>{place});
    const Doing now("a collective");
    std::lock_guard lock(mutex);
    advance(lane_, clock_of(current_lane(device)));  // it sees what the current stream has done
    const auto when = begin(lane_);
    for (const auto& tensor : reads_) use(tensor, when, false);
    for (const auto& tensor : results_) use(tensor, when, true);
    over_ = clock_of(lane_);
  }

  void finish_with(std::exception_ptr error) {
    reads_.clear();
    if (error) {
      future_->setError(error);
    } else {
      const auto before = std::exchange(current_streams[device_], kCollectives);
      future_->markCompleted(c10::IValue(results_));
      current_streams[device_] = before;
    }
    finish(error);
  }

  // The host waits for Gloo; on the device the current stream waits, and the host does not.
  bool wait(std::chrono::milliseconds timeout) override {
    if (PyGILState_Check()) {
      const pybind11::gil_scoped_release released;
      Work::wait(timeout);
    } else {
      Work::wait(timeout);
    }
    return true;
  }
  void synchronize() override {  // by itself; and at the end of Work::wait, which holds its lock
    if (!future_->completed()) wait(kNoTimeout);
    advance(current_lane(device_), over_);
  }
  void blockCurrentStream() override { synchronize(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  Tensors result() override { return results_; }

 private:
  void use(const at::Tensor& tensor, uint64_t when, bool writes) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return;
    note_access(tensor, lane_, when, writes);
    record_stream(tensor.storage().data_ptr(), lane_);  // as NCCL's process group does
  }
  Tensors reads_;  // Gloo's thread reads this memory, which is nobody's once a sender has freed it
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::DeviceIndex device_;
  int lane_;
  Clock over_{};
};

class Queue {
 public:
  Queue() : thread_([this] { work(); }) {}
  ~Queue() {
    {
      std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    if (thread_.get_id() == std::this_thread::get_id())
      thread_.detach();
    else
      thread_.join();
  }
  void add(std::function<void()> job) {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_all();
  }

 private:
  void work() {
    const auto delay = std::chrono::milliseconds(setting("SIM_COLLECTIVE_DELAY_MS", 0));
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return is_over_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      std::this_thread::sleep_for(delay);
      job();
    }
  }
  std::deque<std::function<void()>> jobs_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  std::thread thread_;
};

Tensors cpu(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) all.push_back(tensor.is_privateuseone() ? as_cpu(tensor) : tensor);
  return all;
}
std::vector<Tensors> cpu(const std::vector<Tensors>& lists) {
  std::vector<Tensors> all;
  for (const auto& tensors : lists) all.push_back(cpu(tensors));
  return all;
}
Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}
at::Tensor flat_cpu(const at::Tensor& tensor) { return as_cpu(tensor).view({-1}); }

class SimCcl final : public c10d::Backend {
 public:
  SimCcl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>("simccl"); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start(OpType::BROADCAST, tensors, tensors, [this, t = cpu(tensors), options]() mutable { return gloo_->broadcast(t, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto results = cpu(tensors);
    auto own = options;
    auto divide = mean(own.reduceOp, results);
    return start(OpType::ALLREDUCE, tensors, tensors, [this, results, own]() mutable { return gloo_->allreduce(results, own); }, divide);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto results = cpu(tensors);
    auto own = options;
    auto divide = mean(own.reduceOp, results);
    return start(OpType::ALLREDUCE_COALESCED, tensors, tensors, [this, results, own]() mutable { return gloo_->allreduce_coalesced(results, own); }, divide);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return start(OpType::REDUCE, tensors, tensors, [this, t = cpu(tensors), options]() mutable { return gloo_->reduce(t, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    return start(OpType::ALLGATHER, from, flat(to), [this, a = cpu(to), b = cpu(from), options]() mutable { return gloo_->allgather(a, b, options); });
  }
  WorkPtr _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& options) override {
    check(to), check(from);
    return start(OpType::_ALLGATHER_BASE, {from}, {to}, [this, a = flat_cpu(to), b = flat_cpu(from), options]() mutable { return gloo_->_allgather_base(a, b, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    return start(OpType::COALESCED, from, to, [this, a = cpu(to), b = cpu(from), options]() mutable { return gloo_->allgather_into_tensor_coalesced(a, b, options); });
  }
  WorkPtr gather(std::vector<Tensors>& to, Tensors& from, const c10d::GatherOptions& options) override {
    return start(OpType::GATHER, from, flat(to), [this, a = cpu(to), b = cpu(from), options]() mutable { return gloo_->gather(a, b, options); });
  }
  WorkPtr scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ScatterOptions& options) override {
    return start(OpType::SCATTER, flat(from), to, [this, a = cpu(to), b = cpu(from), options]() mutable { return gloo_->scatter(a, b, options); });
  }
  WorkPtr reduce_scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ReduceScatterOptions& options) override {
    auto results = cpu(to);
    auto own = options;
    auto divide = mean(own.reduceOp, results);
    return start(OpType::REDUCE_SCATTER, flat(from), to, [this, results, b = cpu(from), own]() mutable { return gloo_->reduce_scatter(results, b, own); }, divide);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& options) override {
    check(to), check(from);
    auto result = flat_cpu(to);
    auto own = options;
    auto divide = mean(own.reduceOp, {result});
    return start(OpType::_REDUCE_SCATTER_BASE, {from}, {to}, [this, result, b = flat_cpu(from), own]() mutable { return gloo_->_reduce_scatter_base(result, b, own); }, divide);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& options) override {
    auto results = cpu(to);
    auto own = options;
    auto divide = mean(own.reduceOp, results);
    return start(OpType::COALESCED, from, to, [this, results, b = cpu(from), own]() mutable { return gloo_->reduce_scatter_tensor_coalesced(results, b, own); }, divide);
  }
  WorkPtr alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes, const c10d::AllToAllOptions& options) override {
    check(to), check(from);
    return start(OpType::ALLTOALL_BASE, {from}, {to}, [this, a = as_cpu(to), b = as_cpu(from), to_sizes, from_sizes, options]() mutable { return gloo_->alltoall_base(a, b, to_sizes, from_sizes, options); });
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    return start_beside(OpType::SEND, tensors, {}, [this, t = cpu(tensors), rank, tag]() mutable { return gloo_->send(t, rank, tag); });
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    return start_beside(OpType::RECV, {}, tensors, [this, t = cpu(tensors), rank, tag]() mutable { return gloo_->recv(t, rank, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto own = options;
    own.device_ids.clear();
    own.device.reset();
    return start(OpType::BARRIER, {}, {}, [this, own]() mutable { return gloo_->barrier(own); });
  }

 private:
  using Begin = std::function<WorkPtr()>;

  static void check(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.is_privateuseone(), "simccl carries tensors of sim only, and got one of ", tensor.device());
  }

  std::pair<c10::intrusive_ptr<SimWork>, std::function<void()>> prepare(OpType type, Tensors reads, Tensors writes, Begin begin, std::function<void()> after) {
    for (const auto* tensors : {&reads, &writes})
      for (const auto& tensor : *tensors) check(tensor);
    const auto device = !writes.empty() ? writes[0].device().index() : !reads.empty() ? reads[0].device().index() : current_device;
    auto work = c10::make_intrusive<SimWork>(getRank(), type, std::move(reads), std::move(writes), device);
    auto job = [work, begin = std::move(begin), after = std::move(after)] {
      std::exception_ptr error;
      try {
        begin()->wait();
        after();
      } catch (...) {
        error = std::current_exception();
      }
      work->finish_with(error);
    };
    return {work, job};
  }

  WorkPtr start(OpType type, Tensors reads, Tensors writes, Begin begin, std::function<void()> after = [] {}) {
    auto [work, job] = prepare(type, std::move(reads), std::move(writes), std::move(begin), std::move(after));
    queue_.add(job);
    return work;
  }

  // Sends and receives pass each other: a queue would wait for a peer whose queue waits for this one.
  // Gloo has them from here, so those to one peer are in order.
  WorkPtr start_beside(OpType type, Tensors reads, Tensors writes, Begin begin) {
    auto [work, job] = prepare(type, std::move(reads), std::move(writes), [begun = begin()] { return begun; }, [] {});
    std::thread(job).detach();
    return work;
  }

  // Gloo has no mean: a sum, and what is left to do afterwards.
  std::function<void()> mean(c10d::ReduceOp& operation, Tensors results) const {
    if (operation != c10d::ReduceOp::AVG) return [] {};
    operation = c10d::ReduceOp::SUM;
    return [results, size = getSize()]() mutable {
      at::AutoDispatchBelowADInplaceOrView below;
      for (auto& result : results) result.div_(size);
    };
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  Queue queue_;
};

// Without one of a device, DistributedDataParallel warns at each start.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto first = getTimestamp(start), last = getTimestamp(end);
    return first && last ? std::optional<int64_t>(*last - *first) : std::nullopt;
  }
};

}  // namespace

void define_collectives(pybind11::module_& module) {
  pybind11::module::import("torch.distributed");
  pybind11::class_<SimCcl, c10d::Backend, c10::intrusive_ptr<SimCcl>>(module, "SimCcl")
      .def(pybind11::init([](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
        return c10::make_intrusive<SimCcl>(std::move(gloo), rank, size);
      }));
}

}  // namespace sim

namespace c10d {
namespace {
C10_REGISTER_TYPED_CLASS(TimerRegistry, sim::kDevice, sim::Timer);
}
}  // namespace c10d

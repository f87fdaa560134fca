// A process group's backend for device tensors, over one for the host (gloo). A library of its own,
// compiled when a process group meets the device: most programs have none, and the headers of c10d
// take as long to compile as the rest.
//
// A collective is two commands. The first, on a stream of the group, hands the tensors' memory to
// the transport; it never waits for another process, so that collectives start in the order in which
// they were called, which is what the transport tells them apart by. The second, on a stream that
// is free, waits for the transport. `wait()` of the work orders the current stream behind it.
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include <pybind11/pybind11.h>

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../csrc/collective.h"

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace neuron {

namespace {

using c10d::OpType;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

const c10::impl::VirtualGuardImpl& guard() {
  static const c10::impl::VirtualGuardImpl made(kDevice);
  return made;
}

// Orders what is submitted to `after` from now on behind what `before` has.
void order(const c10::Stream& before, const c10::Stream& after) {
  c10::Event event(kDevice);
  event.record(before);
  event.block(after);
}

// What both halves of a collective share with its work.
struct Outcome {
  std::mutex mutex;
  WorkPtr transport;
  std::exception_ptr error;
  bool arrived = false;
  int source = -1; // of a recv from any rank
};

class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(
      int rank, OpType type, const c10::Stream& stream, Tensors results,
      std::shared_ptr<Outcome> outcome)
      : Work(rank, type),
        device_(stream.device()),
        blocks_host_(type == OpType::BARRIER),
        results_(std::move(results)),
        outcome_(std::move(outcome)),
        event_(kDevice),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_})) {
    event_.record(stream);
    const c10::StreamGuard on(stream); // what follows the future waits for this stream
    future_->markCompleted(at::IValue(results_));
  }

  bool isCompleted() override { return event_.query(); }
  bool isSuccess() const override {
    if (!event_.query()) return false;
    std::lock_guard lock(outcome_->mutex);
    return outcome_->arrived;
  }
  std::exception_ptr exception() const override {
    if (!event_.query()) return nullptr;
    std::lock_guard lock(outcome_->mutex);
    if (outcome_->error || outcome_->arrived) return outcome_->error;
    return std::make_exception_ptr(std::runtime_error(
        "the collective did not run, because what it reads was never computed; read that tensor "
        "to see why"));
  }

  void synchronize() override { event_.block(guard().getStream(device_)); }

  // As of NCCL: without a limit of time it is the stream that waits, and not the host.
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (blocks_host_ && timeout == kNoTimeout) event_.synchronize();
    const auto end = std::chrono::steady_clock::now() + timeout;
    while (timeout != kNoTimeout && !event_.query()) {
      TORCH_CHECK(
          std::chrono::steady_clock::now() < end, c10d::opTypeToString(opType_),
          ": not done after ", timeout.count(), " ms; a process of the group may be late or gone");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  void blockCurrentStream() { synchronize(); }

  int sourceRank() const override {
    event_.synchronize();
    std::lock_guard lock(outcome_->mutex);
    return outcome_->source;
  }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void abort() override {
    std::unique_lock lock(outcome_->mutex);
    const WorkPtr transport = outcome_->transport;
    lock.unlock();
    if (transport) transport->abort();
  }

 private:
  const c10::Device device_;
  const bool blocks_host_;
  const Tensors results_;
  const std::shared_ptr<Outcome> outcome_;
  c10::Event event_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Group final : public c10d::Backend {
 public:
  Group(BackendPtr transport, const CollectiveDoor* door)
      : Backend(transport->getRank(), transport->getSize()),
        transport_(std::move(transport)),
        door_(door) {}

  const std::string getBackendName() const override { return transport_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return transport_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override { transport_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { transport_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return transport_->getSequenceNumberForGroup(); }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool all) override {
    transport_->monitoredBarrier(opts, all);
  }
  void abort() override { transport_->abort(); }
  void shutdown() override { transport_->shutdown(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const bool gives = opts.rootRank == rank_;
    return launch(
        OpType::BROADCAST, "broadcast", gives ? tensors : Tensors(), gives ? Tensors() : tensors,
        [t = transport_, x = on_host(tensors), opts]() mutable { return t->broadcast(x, opts); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return launch(
        OpType::ALLREDUCE, "all_reduce", tensors, tensors,
        [t = transport_, x = on_host(tensors), opts]() mutable { return t->allreduce(x, opts); });
  }
  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return launch(
        OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", tensors, tensors,
        [t = transport_, x = on_host(tensors), opts]() mutable {
          return t->allreduce_coalesced(x, opts);
        });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return launch(
        OpType::REDUCE, "reduce", tensors, tensors,
        [t = transport_, x = on_host(tensors), opts]() mutable { return t->reduce(x, opts); });
  }
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return launch(
        OpType::ALLGATHER, "all_gather", inputs, flat(outputs),
        [t = transport_, y = on_host(outputs), x = on_host(inputs), opts]() mutable {
          return t->allgather(y, x, opts);
        });
  }
  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return launch(
        OpType::_ALLGATHER_BASE, "all_gather_into_tensor", {input}, {output},
        [t = transport_, y = on_host(output), x = on_host(input), opts]() mutable {
          return t->_allgather_base(y, x, opts);
        });
  }
  WorkPtr allgather_coalesced(
      Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return launch(
        OpType::ALLGATHER_COALESCED, "all_gather_coalesced", inputs, flat(outputs),
        [t = transport_, y = on_host(outputs), x = on_host(inputs), opts]() mutable {
          return t->allgather_coalesced(y, x, opts);
        });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return launch(
        OpType::COALESCED, "all_gather_into_tensor_coalesced", inputs, outputs,
        [t = transport_, y = on_host(outputs), x = on_host(inputs), opts]() mutable {
          return t->allgather_into_tensor_coalesced(y, x, opts);
        });
  }
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return launch(
        OpType::GATHER, "gather", inputs, flat(outputs),
        [t = transport_, y = on_host(outputs), x = on_host(inputs), opts]() mutable {
          return t->gather(y, x, opts);
        });
  }
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) override {
    return launch(
        OpType::SCATTER, "scatter", flat(inputs), outputs,
        [t = transport_, y = on_host(outputs), x = on_host(inputs), opts]() mutable {
          return t->scatter(y, x, opts);
        });
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) override {
    return launch(
        OpType::REDUCE_SCATTER, "reduce_scatter", flat(inputs), outputs,
        [t = transport_, y = on_host(outputs), x = on_host(inputs), opts]() mutable {
          return t->reduce_scatter(y, x, opts);
        });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return launch(
        OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", {input}, {output},
        [t = transport_, y = on_host(output), x = on_host(input), opts]() mutable {
          return t->_reduce_scatter_base(y, x, opts);
        });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    return launch(
        OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor_coalesced", inputs, outputs,
        [t = transport_, y = on_host(outputs), x = on_host(inputs), opts]() mutable {
          return t->reduce_scatter_tensor_coalesced(y, x, opts);
        });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    return launch(
        OpType::ALLTOALL_BASE, "all_to_all_single", {input}, {output},
        [t = transport_, y = on_host(output), x = on_host(input), output_splits, input_splits,
         opts]() mutable { return t->alltoall_base(y, x, output_splits, input_splits, opts); });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return launch(
        OpType::ALLTOALL, "all_to_all", inputs, outputs,
        [t = transport_, y = on_host(outputs), x = on_host(inputs), opts]() mutable {
          return t->alltoall(y, x, opts);
        });
  }
  WorkPtr send(Tensors& tensors, int target, int tag) override {
    return launch(
        OpType::SEND, "send", tensors, {},
        [t = transport_, x = on_host(tensors), target, tag]() mutable {
          return t->send(x, target, tag);
        });
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    return launch(
        OpType::RECV, "recv", {}, tensors,
        [t = transport_, x = on_host(tensors), source, tag]() mutable {
          return t->recv(x, source, tag);
        });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return launch(
        OpType::RECVANYSOURCE, "recv", {}, tensors,
        [t = transport_, x = on_host(tensors), tag]() mutable { return t->recvAnysource(x, tag); });
  }
  // The host waits, and the device's current stream of every process has got there.
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    c10::Device device = guard().getDevice();
    if (!opts.device_ids.empty())
      device = c10::Device(kDevice, static_cast<c10::DeviceIndex>(opts.device_ids[0]));
    return launch_on(device, OpType::BARRIER, "barrier", {}, {}, [t = transport_, opts] {
      c10d::BarrierOptions plain = opts;
      plain.device_ids.clear();
      return t->barrier(plain);
    });
  }

 private:
  using Start = std::function<WorkPtr()>;

  struct Streams {
    OwnStream starts;
    std::vector<OwnStream> arrivals;
  };

  at::Tensor on_host(const at::Tensor& tensor) const { return door_->on_host(tensor); }
  Tensors on_host(const Tensors& tensors) const {
    Tensors made;
    for (const at::Tensor& tensor : tensors) made.push_back(on_host(tensor));
    return made;
  }
  Lists on_host(const Lists& lists) const {
    Lists made;
    for (const Tensors& tensors : lists) made.push_back(on_host(tensors));
    return made;
  }
  static Tensors flat(const Lists& lists) {
    Tensors made;
    for (const Tensors& tensors : lists) made.insert(made.end(), tensors.begin(), tensors.end());
    return made;
  }

  WorkPtr launch(
      OpType type, const char* name, const Tensors& reads, const Tensors& writes, Start start) {
    const Tensors& some = reads.empty() ? writes : reads;
    TORCH_CHECK_VALUE(!some.empty(), name, ": there is no tensor");
    return launch_on(some[0].device(), type, name, reads, writes, std::move(start));
  }

  WorkPtr launch_on(
      c10::Device device, OpType type, const char* name, const Tensors& reads,
      const Tensors& writes, Start start) {
    auto outcome = std::make_shared<Outcome>();
    const std::lock_guard lock(mutex_);
    Streams& streams = streams_of(device);
    const c10::Stream starts = streams.starts.stream;
    order(guard().getStream(device), starts);
    door_->submit(
        starts, Half::Start, name, reads, {}, [outcome, start = std::move(start)] {
          WorkPtr transport;
          std::exception_ptr error;
          try {
            transport = start();
          } catch (...) {
            error = std::current_exception(); // the second half throws it, once
          }
          const std::lock_guard hold(outcome->mutex);
          outcome->transport = std::move(transport);
          outcome->error = std::move(error);
        });
    const c10::Stream arrivals = free_stream(streams, device);
    order(starts, arrivals);
    door_->submit(arrivals, Half::Arrival, name, reads, writes, [outcome, type] {
      arrive(*outcome, type);
    });
    return c10::make_intrusive<DeviceWork>(
        rank_, type, arrivals, writes.empty() ? reads : writes, outcome);
  }

  static void arrive(Outcome& outcome, OpType type) {
    std::unique_lock lock(outcome.mutex);
    if (outcome.error) std::rethrow_exception(outcome.error);
    const WorkPtr transport = outcome.transport;
    lock.unlock();
    try {
      transport->wait();
      lock.lock();
      if (type == OpType::RECVANYSOURCE) outcome.source = transport->sourceRank();
      outcome.arrived = true;
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      outcome.error = std::current_exception();
      throw;
    }
    outcome.transport.reset();
  }

  Streams& streams_of(c10::Device device) {
    const void* runtime = door_->runtime();
    if (runtime_ != runtime) streams_.clear();
    runtime_ = runtime;
    auto found = streams_.find(device.index());
    if (found == streams_.end())
      found = streams_.emplace(device.index(), Streams{door_->open(device.index()), {}}).first;
    return found->second;
  }

  // A late arrival holds up no other, so that each has a stream without one in front of it.
  c10::Stream free_stream(Streams& streams, c10::Device device) {
    for (const OwnStream& own : streams.arrivals)
      if (guard().queryStream(own.stream)) return own.stream;
    return streams.arrivals.emplace_back(door_->open(device.index())).stream;
  }

  const BackendPtr transport_;
  const CollectiveDoor* const door_;
  std::mutex mutex_;
  const void* runtime_ = nullptr;
  std::unordered_map<int, Streams> streams_;
};

} // namespace

} // namespace neuron

PYBIND11_MODULE(_neuron_c10d, m) {
  m.def("group", [](const neuron::BackendPtr& transport, uintptr_t door) -> neuron::BackendPtr {
    return c10::make_intrusive<neuron::Group>(
        transport, reinterpret_cast<const neuron::CollectiveDoor*>(door));
  });
}

"""The decode loop: asynchronous LLM decoding written against stream names alone.

It runs on `neuron_streams` or, with `streams=torch.cuda`, on a GPU. `DecodeLoop` is the way in;
the parts are public for those who build a loop of their own.

    coerce.py     what callers pass, as plain Python values
    sampling_params.py  how tokens are chosen, and when to stop
    request.py    what a caller asks for and gets
    admission.py  what is refused before it is queued
    capacity.py   which requests hold slots and rows, and which wait
    request_queue.py  a priority queue from which any request can be removed
    logprobs.py   log-probabilities, as a caller gets them
    detokenizer.py  tokens to text as they arrive, and the stop strings in it
    schedule.py   a step, as data
    policy.py     which rows a step computes, and how much of each
    scheduler.py  who runs next, in which slot
    batch.py      the host's view of the rows of a step
    runner.py     one step on the model, and the async flow between steps
    gather.py     the same without ever breaking that flow
    pending.py    what is pending between the steps of a runner
    launch.py     what fails a step at its launch, and that step alone
    sampled.py    a step's tokens on the host
    output.py     tokens on their way to the host, and the output thread
    queue.py      launched steps whose tokens have not been handed out
    outbox.py     what no step has given yet, and callbacks that are due
    loop.py       what drives all of it
    generate.py   prompts in, an iterator out
    life.py       whether a loop can go on, and what it has ended of
    future.py     a result that comes once, for threads that may be interrupted anywhere
    engine.py     a thread that drives a loop for callers on other threads
    engine_core.py  what that thread does
    request_stream.py  one request's outputs, to iterate over
    model.py      what a model must offer
    stats.py      what is counted
    device_times.py  when the device ran the newest steps
    trace.py      what each step did and when
    metrics.py    how long requests took
"""

from neuron_streams.decode.batch import CachedRequestState as CachedRequestState
from neuron_streams.decode.batch import InputBatch as InputBatch
from neuron_streams.decode.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
from neuron_streams.decode.engine import DecodeEngine as DecodeEngine
from neuron_streams.decode.gather import GatherRunner as GatherRunner
from neuron_streams.decode.logprobs import Logprob as Logprob
from neuron_streams.decode.loop import DecodeLoop as DecodeLoop
from neuron_streams.decode.metrics import RecentLatencies as RecentLatencies
from neuron_streams.decode.metrics import RequestMetrics as RequestMetrics
from neuron_streams.decode.model import Adjustments as Adjustments
from neuron_streams.decode.model import ChunkModel as ChunkModel
from neuron_streams.decode.model import GatherModel as GatherModel
from neuron_streams.decode.model import LogprobsTensors as LogprobsTensors
from neuron_streams.decode.model import Model as Model
from neuron_streams.decode.model import PackedModel as PackedModel
from neuron_streams.decode.model import Sampled as Sampled
from neuron_streams.decode.model import SamplerOutput as SamplerOutput
from neuron_streams.decode.model import SamplingTensors as SamplingTensors
from neuron_streams.decode.model import Window as Window
from neuron_streams.decode.model import WindowModel as WindowModel
from neuron_streams.decode.model import WindowOutput as WindowOutput
from neuron_streams.decode.output import AsyncModelRunnerOutput as AsyncModelRunnerOutput
from neuron_streams.decode.request import Request as Request
from neuron_streams.decode.request import RequestOutput as RequestOutput
from neuron_streams.decode.request import RequestStatus as RequestStatus
from neuron_streams.decode.request_stream import RequestStream as RequestStream
from neuron_streams.decode.runner import ModelRunner as ModelRunner
from neuron_streams.decode.sampled import ModelRunnerOutput as ModelRunnerOutput
from neuron_streams.decode.sampling_params import SamplingParams as SamplingParams
from neuron_streams.decode.schedule import SchedulerOutput as SchedulerOutput
from neuron_streams.decode.scheduler import Scheduler as Scheduler
from neuron_streams.decode.stats import DecodeStats as DecodeStats
from neuron_streams.decode.trace import Span as Span
from neuron_streams.decode.trace import StepRecord as StepRecord
from neuron_streams.decode.trace import StepTrace as StepTrace

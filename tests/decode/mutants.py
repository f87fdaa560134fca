"""Breaks each guard of the decode loop in turn; the tests must notice every time.

`python -m tests.decode.mutants [NAME...]`. Each mutant lives in a forked process that imports one
module from a changed source, runs a few fuzz scripts and then the directed tests.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

SCRIPTS = 32
TIMEOUT = 120.0
HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "neuron_streams" / "decode"
TESTS = (
    "gather",
    "failures",
    "preemption",
    "reports",
    "async_decode",
    "scheduler",
    "runner",
    "output",
)
TESTS = (*TESTS, "loop", "batch", "request", "sampling_params", "admission", "logprobs")
TESTS = (
    *TESTS,
    "capacity",
    "request_queue",
    "sampling_reports",
    "policy",
    "windows",
    "device_times",
    "stats",
)
TESTS = (
    *TESTS,
    "outbox",
    "detokenizer",
    "metrics",
    "streaming_reports",
    "request_stream",
    "engine",
    "future",
    "life",
    "fork",
)


class Mutant(NamedTuple):
    """`old`, which must occur once in the module, becomes `new`."""

    module: str
    old: str
    new: str


MUTANTS = {
    # The async flow of the runner
    "no remap": Mutant("runner", "if req_ids == prev_req_ids:", "if True:"),
    "no snapshot": Mutant(
        "runner",
        "return list(self.input_batch.req_ids)",
        "return type('Live', (list,), {'__iter__': lambda _, b=self.input_batch: iter(b.req_ids),"
        " '__len__': lambda _, b=self.input_batch: len(b.req_ids)})()",
    ),
    "no materialization before the states change": Mutant(
        "runner", 'self._materialize_pending_async_output("batch composition changed")', "pass"
    ),
    "the swap ignores the guard": Mutant(
        "runner", "self._batch_composition_changed = True", "pass"
    ),
    "no comparison of ids": Mutant("runner", "if prev_req_ids is None or", "if"),
    "no check of the row count": Mutant(
        "runner", "if future.shape[0] == host_ids.shape[0] and", "if"
    ),
    "no check of the dtype": Mutant("runner", " and future.dtype == host_ids.dtype:", ":"),
    "no rebuilt inputs": Mutant(
        "runner",
        "            model_input = self._prepare_model_input(scheduler_output)\n"
        "        return model_input, mismatch",
        "            pass\n        return model_input, mismatch",
    ),
    "a prefill takes the future": Mutant("runner", 'return model_input, "prefill"', "pass"),
    "a stale buffer after an empty schedule": Mutant(
        "runner",
        "            self.async_execution_buffer = {}\n            return",
        "            return",
    ),
    "a remap counts as async": Mutant("runner", '"reorder" if broke_async else None', "None"),
    "a piece of a prompt yields a token": Mutant(
        "runner", "self._partial_req_ids = scheduler_output.partial_req_ids", "pass"
    ),
    "a failed row decodes on": Mutant(
        "runner", "state.ended |= output.error_of(key) is not None", "pass"
    ),
    "the waiting's failure is the step's": Mutant(
        "runner", "if not launched.query():", "if False:"
    ),
    # What is pending
    "the newest output alone": Mutant("pending", "        while self:\n", "        if self:\n"),
    "a failure on another rank is swallowed": Mutant(
        "pending", " or not self._is_output_rank:", ":"
    ),
    "a failure of the reader is swallowed": Mutant("pending", "error is not oldest.error or", ""),
    "the watchdog does not see a break": Mutant("pending", "self._before_read(oldest)", "pass"),
    "outputs of other ranks pile up": Mutant("pending", " or len(self) >= self._most", ""),
    # Outputs
    "the copy does not wait": Mutant("output", "copy_stream.wait_stream(compute_stream)", "pass"),
    "the event is not behind the copy": Mutant(
        "output", "self._copied.record(copy_stream)", "self._copied.record(compute_stream)"
    ),
    "no wait for the event": Mutant("output", "self._copied.synchronize()", "pass"),
    "the device tensor is kept for ever": Mutant(
        "output", "self._device_tokens = self._host_tokens = None", "self._host_tokens = None"
    ),
    "a value is computed again": Mutant("output", "if not self.done:", "if self.error is None:"),
    "an older failure is this step's": Mutant(
        "output", "tokens, error = self._read_again(self._device_tokens, error)", "tokens = None"
    ),
    "an interrupted wait is the step's failure": Mutant(
        "output", "if not self._copied.query():", "if False:"
    ),
    # The gather
    "a gather of the host's ids": Mutant(
        "gather", "self.model).decode_gather(", "self.model).decode("
    ),
    "no check of the rows": Mutant("gather", "        self._check_rows()", "        pass"),
    # The batch
    "tokens stay where they were": Mutant(
        "batch",
        "tokens[first], tokens[second] = tokens[second], tokens[first]",
        "pass",
    ),
    "padding on a live row": Mutant(
        "batch",
        "rows += [(0, 0, 0)] * (num_rows - len(rows))",
        "rows += rows[:1] * (num_rows - len(rows))",
    ),
    "a row forgets its outputs": Mutant(
        "batch",
        "known = state.prompt_token_ids + state.output_token_ids",
        "known = state.prompt_token_ids[:]",
    ),
    "a piece starts over": Mutant("batch", "tokens[start : start + length]", "tokens[:length]"),
    # The scheduler
    "a slot comes free early": Mutant(
        "scheduler", "        if request.num_in_flight:\n            return\n", ""
    ),
    "limits ignore what is in flight": Mutant(
        "request",
        "(len(self.output_token_ids) + self.num_output_placeholders)",
        "len(self.output_token_ids)",
    ),
    "one name over a preemption": Mutant("scheduler", "if request.prefill_token_ids:", "if False:"),
    "a start before all tokens are known": Mutant(
        "scheduler",
        "        if request.num_in_flight:\n            return False",
        "        if False:\n            return False",
    ),
    "a late token is not dropped": Mutant(
        "scheduler",
        "            if request.status.is_finished:\n                self",
        "            if False:\n                self",
    ),
    "finished requests are not reported": Mutant(
        "scheduler",
        "RUNNING:\n            self._finished_req_ids.add(request.key)",
        "RUNNING:\n            pass",
    ),
    "an ending request keeps its row": Mutant(
        "scheduler", "            if request.is_ending:\n", "            if False:\n"
    ),
    "an ending request gets its row back": Mutant(
        "scheduler", "        if not request.is_ending:\n", "        if True:\n"
    ),
    "an ending request is preempted": Mutant(
        "scheduler", "RequestStatus.RUNNING or request.is_ending:", "RequestStatus.RUNNING:"
    ),
    "a paused request is work": Mutant(
        "scheduler", "return len(self._by_id) > len(self._paused)", "return bool(self._by_id)"
    ),
    "a paused request that has ended is counted": Mutant(
        "scheduler", "self._paused.discard(request)\n        self._release", "self._release"
    ),
    "a victim too many": Mutant("scheduler", "None if self.capacity.slots_come_free else ", ""),
    # The policy of a step
    "more pieces than a step takes": Mutant(
        "policy", "in prompts[: self._most_prompts]:", "in prompts:"
    ),
    "pieces in any order": Mutant(
        "policy",
        "return sorted(prompts, key=lambda request: request.order)",
        "return prompts[::-1]",
    ),
    "a chunk beyond the bound": Mutant("policy", "min(largest, bound - len(beside))", "largest"),
    "rows that decode take no room": Mutant("policy", "bound - len(beside))", "bound)"),
    "the bound holds where nobody waits": Mutant(
        "policy", "bound = self._bound if decoding else None", "bound = self._bound"
    ),
    "two chunks in a row": Mutant("policy", "or (decoding and self._decode_is_due)", ""),
    "a mixed step is followed by a decode step": Mutant(
        "policy", "bound is not None and not self._mixes", "bound is not None"
    ),
    "rows that decode stay behind": Mutant(
        "policy", "beside = decoding if self._mixes else []", "beside = []"
    ),
    "a prompt too many for the bucket": Mutant("policy", "space -= self._padded(count)", "pass"),
    "blocks are not rounded up": Mutant(
        "policy", "-(-count // self._block) * self._block", "count"
    ),
    "a bucket of padding": Mutant("policy", "2 * taken >= self._buckets[fits]", "True"),
    "some start and some go on": Mutant(
        "policy", "return not self._mixes and not starts", "return False"
    ),
    "a whole prompt is cut": Mutant("policy", "        if self._cuts:\n", "        if True:\n"),
    "in order of arrival": Mutant(
        "policy", "length = request.num_tokens_left if overtakes else 0", "length = 0"
    ),
    "a long prompt starves": Mutant(
        "policy", "overtakes = request.num_overtaken < MOST_OVERTAKEN", "overtakes = True"
    ),
    "whoever came earlier overtakes": Mutant("policy", " and other.arrival > request.arrival", ""),
    "a bound without room": Mutant(
        "policy", "max_num_batched_tokens < max_batch_size:", "max_num_batched_tokens < 1:"
    ),
    "one new prompt at a time": Mutant("policy", "return self._max_batch_size\n", "return 1\n"),
    "a mixed step takes stale ids": Mutant(
        "runner",
        "            model_input = self._prepare_model_input(scheduler_output)\n        return"
        ' model_input, "mixed"',
        '            pass\n        return model_input, "mixed"',
    ),
    "a mixed step passes for a prefill": Mutant(
        "runner",
        "if not self.input_batch.decodes:\n            return model_input",
        "if True:\n            return model_input",
    ),
    "a failed row is packed": Mutant(
        "batch", "([0] * length, 0, 0) if state.ended else (tokens", "(tokens"
    ),
    # Windows
    "a window beside those who wait": Mutant(
        "policy", "if prompts or capacity.somebody_waits:", "if prompts:"
    ),
    "somebody who waits for a row is overlooked": Mutant(
        "capacity", " or self._rowless.first is not None", ""
    ),
    "a window that no row can fill": Mutant(
        "policy", " if size <= most), default=1", "), default=1"
    ),
    "a window beyond max_tokens": Mutant(
        "policy",
        "counts = {request: min(num_steps, request.num_tokens_to_come) for request in decoding}",
        "counts = dict.fromkeys(decoding, num_steps)",
    ),
    "a row has no limit": Mutant(
        "batch", "_int32([*limits, *padding])", "_int32([num_steps] * num_rows)"
    ),
    "nothing stops a row on the device": Mutant("batch", "MAX_STOP_IDS)]\n", "0)]\n"),
    "a padding row takes part": Mutant(
        "batch", "padding = [0] * (num_rows", "padding = [1] * (num_rows"
    ),
    "the first tokens of a window go on": Mutant(
        "runner",
        "sampled.last_token_ids if isinstance",
        "sampled.sampled_token_ids[0] if isinstance",
    ),
    "what a row that has stopped gives is tokens": Mutant(
        "sampled", "[[*takewhile(NO_TOKEN.__ne__, column)]", "[[*column]"
    ),
    "logprobs of the first step for all": Mutant("logprobs", "ids[step][row][", "ids[0][row]["),
    "a window brings one token": Mutant(
        "schedule", "return self.num_scheduled_tokens[key]", "return 1"
    ),
    "surplus is not counted": Mutant(
        "scheduler", "self.stats.extra_tokens_dropped += len(token_ids) - len(kept)", "pass"
    ),
    "a row that stops for no reason goes on": Mutant(
        "scheduler", "if stops_early and not request.status.is_finished:", "if False:"
    ),
    "a row that gives nothing goes on": Mutant(
        "scheduler", "elif token_ids or scheduler_output.num_steps > 1:", "elif token_ids:"
    ),
    "a row that has stopped decodes on": Mutant(
        "batch", "state.ended |= token_id in state.params.stop_ids(self.eos_token_ids)", "pass"
    ),
    "room is held for tokens, not outputs": Mutant(
        "scheduler",
        "min(request.num_in_flight, request.num_output",
        "max(request.num_in_flight, request.num_output",
    ),
    "windows of a model that has none": Mutant("policy", "if sizes is None:", "if False:"),
    "windows of any size": Mutant("policy", "if steps_per_launch not in sizes:", "if False:"),
    # Slots, rows and their queues
    "a paused request decodes": Mutant("capacity", "if not request.paused:\n", "if True:\n"),
    "the oldest is preempted": Mutant("capacity", "-priority, -arrival", "-priority, arrival"),
    "the most urgent is preempted": Mutant("capacity", "-priority, -arrival", "priority, -arrival"),
    "a request at work is preempted before a paused one": Mutant(
        "capacity", "return not request.paused, -priority", "return False, -priority"
    ),
    "equals are preempted": Mutant(
        "capacity", "request.priority < victim.priority)", "request.priority <= victim.priority)"
    ),
    "the cap counts the most urgent alone": Mutant(
        "capacity", "return max(self.rows, key=_order)", "return min(self.rows, key=_order)"
    ),
    "an urgent request passes the cap": Mutant(
        "capacity", "not self._is_full or request.priority", "True or request.priority"
    ),
    "a request as urgent takes the row": Mutant(
        "capacity", "request.priority < self._last", "request.priority <= self._last"
    ),
    "no request takes a row back": Mutant(
        "capacity", " and _order(self._last_row) < _order(request):", ":"
    ),
    "more rows than the bucket": Mutant(
        "capacity", "        if self._is_full:\n", "        if False:\n"
    ),
    "a row that is taken is not given back": Mutant(
        "capacity", "            self._rowless.add(last)\n", ""
    ),
    "what has left the queue goes first": Mutant(
        "request_queue", "if self._entries.get(request) is heap[0]:", "if True:"
    ),
    "an old place in the queue counts": Mutant(
        "request_queue", "if self._entries.get(request) is heap[0]:", "if request in self:"
    ),
    "what has left the queue is kept": Mutant(
        "request_queue", "if len(self._heap) > 2 * len(self._entries):", "if False:"
    ),
    "pieces count as tokens": Mutant(
        "schedule", "return 0 if key in self.partial_req_ids else 1", "return 1"
    ),
    "a preempted request keeps its count": Mutant(
        "scheduler", "            request.num_computed_tokens = 0\n", ""
    ),
    "a preempted request forgets its outputs": Mutant(
        "scheduler",
        "= request.prompt_token_ids + request.output_token_ids",
        "= request.prompt_token_ids",
    ),
    "a failed step ends nobody": Mutant(
        "scheduler", "elif (error := model_runner_output.error_of(key)) is not None:", "elif False:"
    ),
    "a refused launch ends the loop": Mutant(
        "launch", "except Exception as error:", "except ArithmeticError as error:"
    ),
    "a refused launch leaves its future": Mutant(
        "runner",
        "            self._drop_future()\n            self._check",
        "            self._check",
    ),
    "a refused launch leaves older tokens unread": Mutant(
        "runner", 'self._materialize_pending_async_output("a launch failed")', "pass"
    ),
    "an output that cannot be made ends the loop": Mutant(
        "runner", "except Exception as cause:", "except ArithmeticError as cause:"
    ),
    "an output that cannot be read ends the loop": Mutant(
        "output", "except Exception as unreadable:", "except ArithmeticError as unreadable:"
    ),
    "any result is token ids": Mutant(
        "launch",
        "if dtype in _INTEGERS and shape and shape[:-1] == windowed and shape[-1] >= rows:",
        "if True:",
    ),
    "floats are token ids": Mutant("launch", "dtype in _INTEGERS and", ""),
    "a column is token ids": Mutant("launch", " and shape[:-1] == windowed and", " and"),
    "rows may be missing": Mutant("launch", " and shape[-1] >= rows:", ":"),
    "a negative token is one": Mutant("sampled", "if token_id >= 0 and (", "if ("),
    "any token is in the vocabulary": Mutant(
        "sampled", "(vocab_size is None or token_id < vocab_size)", "True"
    ),
    "a refused step is traced": Mutant(
        "trace", "if record._events is None or record._events[1] is None:", "if False:"
    ),
    # What is counted
    "a step that runs counts as ended": Mutant(
        "device_times", "if step is None or not step[1].query():", "if step is None:"
    ),
    "a rest counts as idle": Mutant(
        "loop", "if not (self.scheduler.has_work or self.batch_queue):", "if False:"
    ),
    "a whole prompt is a chunk": Mutant(
        "stats", "count < len(request.prefill_token_ids) for", "True for"
    ),
    # Adjustments
    "a plain row spares all rows their adjustments": Mutant(
        "batch", "if any(p.adjusts for p in params)", "if all(p.adjusts for p in params)"
    ),
    "output before a preemption is prompt": Mutant(
        "batch", "            new.num_prompt_tokens,", "            len(new.prompt_token_ids),"
    ),
    "min_tokens is one too few": Mutant(
        "batch",
        "state.num_prompt_tokens + state.params.min_tokens",
        "state.num_prompt_tokens + max(0, state.params.min_tokens - 1)",
    ),
    "min_tokens is one too many": Mutant(
        "batch",
        "state.num_prompt_tokens + state.params.min_tokens",
        "state.num_prompt_tokens + state.params.min_tokens + 1",
    ),
    "an end-of-sequence before min_tokens": Mutant(
        "batch", "p.stop_ids(self.eos_token_ids)", "p.stop_ids(frozenset())"
    ),
    "a plain row is masked": Mutant("batch", "= p.min_tokens > 0", "= True"),
    "the bias is another row's": Mutant("batch", "logit_bias[row, list", "logit_bias[0, list"),
    "an end-of-sequence that is ignored stops": Mutant(
        "sampling_params", "stops if self.ignore_eos else", "stops if False else"
    ),
    "a penalty below 1 is none": Mutant(
        "sampling_params", "self.repetition_penalty != 1,", "self.repetition_penalty > 1,"
    ),
    "a bias that is infinite on the device": Mutant(
        "sampling_params", "if not bias <= FLOAT32_MAX:", "if not bias < math.inf:"
    ),
    "ids outside the vocabulary": Mutant(
        "admission", "if not 0 <= token_id < model.vocab_size]", "if token_id < 0]"
    ),
    "a model is asked for what it cannot": Mutant(
        "admission", "if params.adjusts and not", "if False and not"
    ),
    "a model that is silent can": Mutant(
        "admission", '"adjusts_logits", False)', '"adjusts_logits", True)'
    ),
    "more alternatives than tokens": Mutant("admission", "> model.vocab_size:", "> 20:"),
    "min_tokens for which there is no room": Mutant("admission", "> room:", "> room + 1:"),
    "nothing is left to sample": Mutant(
        "admission", "excluded |= params.stop_ids(model.eos_token_ids)", "pass"
    ),
    "the least bias excludes nothing": Mutant(
        "admission", "if value < -FLOAT32_MAX}", 'if value == -float("inf")}'
    ),
    # Log-probabilities
    "logprobs of another row": Mutant("logprobs", "logprobs[step][row],", "logprobs[step][0],"),
    "a rank of another row": Mutant("logprobs", "ranks[step][row])", "ranks[step][-1])"),
    "an alternative too few": Mutant("logprobs", "[: most + 1]", "[: most or 1]"),
    "an alternative too many": Mutant("logprobs", "[: most + 1]", "[: most + 2]"),
    "a rank too low": Mutant("logprobs", "*range(1, len(ids))", "*range(len(ids))"),
    "logprobs are copied for nobody": Mutant(
        "logprobs", "num_logprobs:\n        return tokens", "num_logprobs:\n        return sampled"
    ),
    "logprobs are waited for": Mutant(
        "logprobs", "non_blocking=non_blocking) for tensor", "non_blocking=False) for tensor"
    ),
    "nobody notices that logprobs are missing": Mutant(
        "logprobs", "if logprobs is None:\n        raise", "if False:\n        raise"
    ),
    "copies on the compute stream": Mutant(
        "output", "with streams.stream(copy_stream):", "with streams.stream(compute_stream):"
    ),
    "a second read leaves the logprobs": Mutant(
        "output", "return to_host(sampled), None", "return to_host(split(sampled)[0]), None"
    ),
    "the logprobs are not kept until the copy": Mutant(
        "output",
        "self._device_tokens: Sampled | None = sampled\n",
        "self._device_tokens: Sampled | None = split(sampled)[0]\n",
    ),
    "logprobs of whoever has the row now": Mutant(
        "runner",
        "            num_logprobs,\n            self.model",
        "            type('Live', (), {'__iter__': lambda _, b=self.input_batch:"
        " iter(b.num_logprobs(frozenset()))})(),\n            self.model",
    ),
    "a piece of a prompt wants logprobs": Mutant(
        "batch", "if state.ended or state.key in partial else", "if state.ended else"
    ),
    "a failed row wants logprobs": Mutant(
        "batch", "if state.ended or state.key in partial else", "if state.key in partial else"
    ),
    "logprobs of nought are none": Mutant(
        "batch", "-1 if p.logprobs is None else p.logprobs", "p.logprobs or -1"
    ),
    "logprobs of dropped tokens": Mutant(
        "scheduler", "logprobs or ())[: len(kept)]", "logprobs or ())"
    ),
    "logprobs of the first row for all": Mutant("scheduler", "logprobs[row] if", "logprobs[0] if"),
    "logprobs for those who do not ask": Mutant(
        "request", "None if self.params.logprobs is None else logprobs", "logprobs"
    ),
    # The loop and its queue
    "one step too many in flight": Mutant(
        "loop",
        "len(self.batch_queue) < self.max_concurrent_batches",
        "len(self.batch_queue) <= self.max_concurrent_batches",
    ),
    "the last cause, not the first": Mutant(
        "life", "self.cause = first or error", "self.cause = error"
    ),
    "drain leaves steps": Mutant(
        "loop", "        while self.batch_queue:\n", "        if self.batch_queue:\n"
    ),
    "drain without a thread forgets the time": Mutant(
        "queue", "(ended := step.is_ready())", "(ended := True)"
    ),
    "drain without a thread is always late": Mutant(
        "queue", "(ended := step.is_ready())", "(ended := False)"
    ),
    "generate goes on for others": Mutant(
        "generate", "if not self._may_come():", "if not loop.has_unfinished_requests():"
    ),
    "generate leaves what is in flight": Mutant("scheduler", "request.num_in_flight > 0 or ", ""),
    "the thread's failure is the step's": Mutant("queue", " or output.error is not error:", ":"),
    "the watchdog sleeps": Mutant(
        "queue", "            self._watch(step)\n            step", "            step"
    ),
    "a failed step stays in the queue": Mutant("queue", "del self._steps[0]", "pass"),
    # Text and stop strings
    "half a character is shown": Mutant(
        "detokenizer", "if not text.endswith(_INCOMPLETE):", "if True:"
    ),
    "the window grows": Mutant("detokenizer", "if self._complete > (", "if 0 and ("),
    "a clean-up is not waited for": Mutant(
        "detokenizer", "len(text) if tail is None else tail.start()", "len(text)"
    ),
    "a text that only grows is held back": Mutant(
        "detokenizer", " if self._rewrites else None", ""
    ),
    "a stop string is not looked for in what is unsettled": Mutant(
        "detokenizer", "text = self._held + self._decoder.unsettled", "text = self._held"
    ),
    "what a clean-up may complete is not held back": Mutant(
        "detokenizer", "for one in (self._held, text)", "for one in (text,)"
    ),
    "a spoiled character is given again": Mutant(
        "detokenizer", "if not text.startswith(self._given):", "if False:"
    ),
    "unsettled text is lost where the text reads otherwise": Mutant(
        "detokenizer", 'last, self.unsettled = self.unsettled, ""', 'last, self.unsettled = "", ""'
    ),
    "a token left out is the context": Mutant(
        "detokenizer", "if text != self._given + self.unsettled:", "if True:"
    ),
    "bytes are text": Mutant("detokenizer", "if not isinstance(text, str):", "if False:"),
    "a tokenizer gets our list": Mutant("detokenizer", "[*token_ids]", "token_ids"),
    "a special token at the start is the stop string's": Mutant(
        "detokenizer", "Counter(token_ids) - around", "token_ids"
    ),
    "junk is held for ever": Mutant(
        "detokenizer", "if len(self._ids) - self._complete > _WINDOW:", "if False:"
    ),
    "no tail is held back": Mutant("detokenizer", "len(one) - self._stops.held(one)", "len(one)"),
    "a stop string may end in old text": Mutant("detokenizer", "max(0, old - len(stop) + 1)", "0"),
    "the last stop string wins": Mutant(
        "detokenizer", "min(ends, default=None)", "max(ends, default=None)"
    ),
    "a stop string ends the request a token early": Mutant(
        "detokenizer",
        "self._num_tokens > self._heeds_after",
        "self._num_tokens >= self._heeds_after",
    ),
    "what was held back is lost": Mutant(
        "detokenizer", "self._held + self._decoder.flush()", "self._decoder.flush()"
    ),
    "half a character at the end is lost": Mutant(
        "detokenizer", "self._held + self._decoder.flush()", "self._held"
    ),
    "a stop token is shown": Mutant(
        "detokenizer", "if stop_terminated and not self._includes_stop:", "if False:"
    ),
    "a stop string ends nobody": Mutant(
        "request",
        "status if self.stop_string is None else RequestStatus.FINISHED_STOPPED",
        "status",
    ),
    "a tokenizer's failure ends all": Mutant(
        "request", "except Exception as error:", "except ZeroDivisionError as error:"
    ),
    "stop strings without a tokenizer": Mutant(
        "admission", "if params.stop and tokenizer is None:", "if False:"
    ),
    "a stop string that is never shown": Mutant(
        "admission", "if token_id is not None:", "if False:"
    ),
    "the caller's own parameters": Mutant("admission", "return replace(params)", "return params"),
    "text is a list": Mutant("coerce", "if isinstance(values, (str, bytes, bytearray)):", "if 0:"),
    "an array is a number": Mutant("coerce", 'if getattr(value, "ndim", 0):', "if 0:"),
    "text is a number": Mutant(
        "coerce", "if not is_number or isinstance(value, (str, bytes)):", "if 0:"
    ),
    "a subclass of str stays one": Mutant("coerce", "return str.__str__(value)", "return value"),
    # Callbacks
    "a callback's failure is swallowed": Mutant("outbox", "self.errors.append(error)", "pass"),
    "a callback's failure costs the outputs": Mutant(
        "outbox",
        "            raise error",
        "            self.outputs = []\n            raise error",
    ),
    "a failed callback is called again": Mutant(
        "outbox", "                request.on_output = None\n", ""
    ),
    "a failed callback ends nobody": Mutant(
        "outbox", "if not request.status.is_finished:", "if False:"
    ),
    "a failure waits for a step that nobody makes": Mutant(
        "outbox", "self.outputs or self.errors", "self.outputs"
    ),
    # The engine and its streams
    "an abort by id alone": Mutant(
        "engine_core",
        "if live is not None and live.queue is queue:\n            del",
        "if live is not None:\n            del",
    ),
    "an old stream aborts a new request": Mutant(
        "engine_core", " or (queue is not None and queue is not bearer)", ""
    ),
    "no room for what is in flight": Mutant(
        "engine_core", "live.queue.hold(in_flight)", "live.queue.hold(0)"
    ),
    "a pause that was asked for is forgotten": Mutant("engine_core", " or live.asked_to_pause", ""),
    "the end is told before the id is free": Mutant(
        "engine_core",
        "if output.finished and not self._forget(live):",
        "if output.finished and (live.queue.put(output), not self._forget(live))[1]:",
    ),
    "an abort that was promised is no abort": Mutant(
        "engine_core",
        "if output.finished and not self._forget(live):",
        "if output.finished and self._forget(live) is None:",
    ),
    "all that are paused are looked through": Mutant(
        "engine_core",
        "nearly_full, self._nearly_full = self._nearly_full, set()",
        "nearly_full = set(self._nearly_full)",
    ),
    "a step is not looked at": Mutant(
        "engine_core", "in self.loop.batch_queue.newest_req_ids:", "in ():"
    ),
    "an output is not looked at": Mutant(
        "engine_core",
        "        live.queue.put(output)\n        self._note_room(live)\n",
        "        live.queue.put(output)\n",
    ),
    "a reader that makes room is not looked at": Mutant(
        "engine_core", "partial(self._inbox.put, partial(self._look_at, request_id))", "self.wake"
    ),
    "a dropped stream that has a callback is not looked at": Mutant(
        "engine_core", "if queue.abandoned else look_at)", "if queue.abandoned else _nothing)"
    ),
    "a dropped stream goes on": Mutant(
        "engine_core", "partial(self._abort, queue) if queue.abandoned else look_at", "look_at"
    ),
    "a dropped stream is in the way": Mutant(
        "engine_core", "if request_id in self._live:", "if False:"
    ),
    "streams do not hear of the failure": Mutant("engine_core", "queue.end(over)", "pass"),
    "who drains does not hear of the failure": Mutant(
        "engine_core", "future.set_exception(over)", "pass"
    ),
    "a callback is called after the end": Mutant("engine_core", "None if self._over else ", ""),
    "a callback's failure is the loop's": Mutant(
        "engine_core",
        "        except Exception as error:\n            live.on_output = None",
        "        except ZeroDivisionError as error:\n            live.on_output = None",
    ),
    "a callback may wait for itself": Mutant(
        "engine_core",
        "if self._turning and self.driver in (None, threading.current_thread()):",
        "if False:",
    ),
    "the thread's own stream": Mutant(
        "engine_core",
        "runner.streams.stream(runner.compute_stream)",
        "torch.inference_mode(inference)",
    ),
    "full until one is free": Mutant(
        "request_stream", "self.max_queued // 2 if self._full else ", ""
    ),
    "nobody is told of room": Mutant("request_stream", "self._on_room()", "pass"),
    "an error passes for the end": Mutant(
        "request_stream", "_raisable(error or output.error)", "(error or output.error)"
    ),
    "a cancelled reader's request goes on": Mutant(
        "request_stream", "            self.close()\n            raise", "            raise"
    ),
    "readers stay asleep": Mutant("request_stream", "            waker()\n", ""),
    "a reader takes what another has taken": Mutant(
        "request_stream",
        "        except KeyError:\n            del self._gathered[number]",
        "        except KeyError:\n            pass",
    ),
    "an unread queue fills up": Mutant("request_stream", " > most and not self.unread", " > most"),
    "a closed stream keeps its outputs": Mutant(
        "request_stream",
        "            self._discarded = True\n            self.outputs.clear()\n",
        "            pass\n",
    ),
    "an output after the end": Mutant(
        "request_stream",
        "        if self._ends:\n            return\n",
        "",
    ),
    # Interrupts and forks
    "a change leaves no mark": Mutant("life", "self._life._mark = self._what", "pass"),
    "a mark is overlooked": Mutant(
        "life", "if self._mark is not None and self.cause is None:", "if False:"
    ),
    "an interrupted wait ends the loop": Mutant(
        "life", "elif self._what is not None or isinstance(error, Exception):", "else:"
    ),
    "a child passes for its parent": Mutant(
        "life", "        if not self:\n", "        if False:\n"
    ),
    "an interrupted callback is called again": Mutant(
        "outbox", "if output is self._begun:", "if False:"
    ),
    "a callback that was called passes for interrupted": Mutant(
        "outbox", " or output is self._done", ""
    ),
    "an interrupted pump loses its output": Mutant(
        "queue", "self._handler.read(step.awaited, step.future)", "pass"
    ),
    "an interrupted admission keeps its id": Mutant(
        "engine", "            stream.close()", "            pass"
    ),
    "a dropped iterator's requests go on": Mutant("loop", "if iterator() is None:", "if False:"),
    "a dropped iterator's outputs are another's": Mutant(
        "loop", "if out.request_id not in request_ids]", "]"
    ),
    "a close that was interrupted is the last": Mutant(
        "loop", "        if self._has_been_closed:\n", "        if self._life.closed:\n"
    ),
}
CONTROL = Mutant("runner", "if req_ids == prev_req_ids:", "if req_ids == prev_req_ids:")
QUICK = (
    "no remap",
    "no snapshot",
    "no materialization before the states change",
    "the newest output alone",
    "the copy does not wait",
    "a slot comes free early",
    "limits ignore what is in flight",
    "one name over a preemption",
)


class _Finder(importlib.abc.MetaPathFinder):
    """Imports one module of the decode loop from a changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = f"neuron_streams.decode.{mutant.module}"
        self.file = PACKAGE / f"{mutant.module}.py"
        source = self.file.read_text()
        if source.count(mutant.old) != 1:
            raise LookupError(f"{mutant.old!r} is {source.count(mutant.old)} times in {self.file}")
        self.code = compile(source.replace(mutant.old, mutant.new), str(self.file), "exec")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        loader = _Loader(fullname, str(self.file))
        loader.code = self.code
        return importlib.util.spec_from_file_location(fullname, self.file, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    code: CodeType

    def get_code(self, fullname: str) -> CodeType:
        return self.code


def _live(mutant: Mutant) -> None:
    """Exit with 0 if no test notices."""
    if not os.environ.get("MUTANTS_VERBOSE"):
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
    sys.meta_path.insert(0, _Finder(mutant))
    os._exit(0 if _fuzz_passes() and _tests_pass() else 1)


def _fuzz_passes() -> bool:
    logging.disable()
    try:
        from tests.decode import fuzz

        for seed in range(SCRIPTS):
            fuzz.check_script(seed, fuzz.in_turn(seed))
    except BaseException:
        return False
    logging.disable(logging.NOTSET)
    return True


def _tests_pass() -> bool:
    import pytest

    files = [str(HERE / f"test_{name}.py") for name in TESTS]
    plugins = ["-p", "no:cacheprovider", "-p", "no:randomly"]
    return pytest.main([*files, "-x", "-q", "-m", "not slow", *plugins]) == 0


def check(mutant: Mutant) -> str:
    """How a mutant ended: `killed`, `killed (hangs)` or `SURVIVED`."""
    _Finder(mutant)  # a guard that has moved is an error here, not a kill
    child = multiprocessing.get_context("fork").Process(target=_live, args=(mutant,))
    child.start()
    child.join(TIMEOUT)
    if child.is_alive():
        child.kill()
        child.join()
        return "killed (hangs)"
    return "SURVIVED" if child.exitcode == 0 else "killed"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--quick", action="store_true", help="a few of them")
    options = parser.parse_args(argv)
    import pytest  # noqa: F401  (once, ahead of the forks)
    import torch  # noqa: F401

    if check(CONTROL) != "SURVIVED":
        print("The tests fail with nothing broken; run them first.")
        return 2
    survivors = []
    for name in options.names or (QUICK if options.quick else MUTANTS):
        start = time.monotonic()
        end = check(MUTANTS[name])
        print(f"{time.monotonic() - start:6.1f} s  {end:15} {name}", flush=True)
        if end == "SURVIVED":
            survivors.append(name)
    print(f"{len(survivors)} survived" + "".join(f"\n  {name}" for name in survivors))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

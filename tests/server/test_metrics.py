"""What the counters of speculative decoding say where each step chooses its rows."""

from k26jax.engine.output import CompletionOutput, RequestMetrics
from k26jax.engine.request import Request, SamplingParams
from k26jax.engine.scheduler import Job
from k26jax.server.metrics import Metrics


def test_steps_are_counted_by_their_rows():
    request = RequestMetrics(generated_tokens=9, target_forwards=4, accept_lengths=[1, 1, 4, 2])
    for rows in (1, 1, 8, 4):
        request.count_rows(rows)
    job = Job(0, Request((1,), SamplingParams(), 9, (), 0), lambda _: None, False)
    job.ended_at, job.outcome = job.queued_at + 1, "length"
    job.output = CompletionOutput(0, "", [], "length", None, request)
    metrics = Metrics("tiny")
    metrics.drafted = 31
    metrics.ended(job)
    assert metrics.rows() == {1: 2, 4: 1, 8: 1}
    text = metrics.text().decode()
    assert 'spec_decode_steps_total{model_name="tiny",rows="8"} 1.0' in text
    assert 'spec_decode_num_draft_tokens_total{model_name="tiny"} 10.0' in text
    assert 'spec_decode_num_accepted_tokens_total{model_name="tiny"} 4.0' in text

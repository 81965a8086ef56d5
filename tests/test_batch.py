"""The batch reader and its resumable output, on files of every bad shape; no model is run."""

from __future__ import annotations

import json

from k26jax.batch import BadLine, Job, drop_partial_line, read_jobs


def test_good_and_bad_lines_are_told_apart_by_number(tmp_path):
    lines = [
        '{"custom_id": "a", "prompt": "x", "max_tokens": 3}',
        "",
        "[1]",
        "{broken",
        '{"custom_id": "a", "prompt": "again"}',
        '{"custom_id": "b", "promt": "x"}',
        '{"custom_id": "c", "prompt_token_ids": [1, 2], "temperature": -1}',
        '{"custom_id": 7, "prompt": "x"}',
        '{"custom_id": "d", "prompt_token_ids": [1, 2]}',
    ]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    jobs = list(read_jobs(source, {"temperature": 0.0}))
    good = [job for job in jobs if isinstance(job, Job)]
    bad = {job.line: job.error for job in jobs if isinstance(job, BadLine)}
    assert [(job.line, job.custom_id) for job in good] == [(1, "a"), (9, "d")]
    assert good[0].params.max_tokens == 3
    assert good[1].params.temperature == 0.0
    assert sorted(bad) == [3, 4, 5, 6, 7, 8]
    assert "did you mean 'prompt'" in bad[6]
    assert "temperature" in bad[7]
    assert "used before" in bad[5]


def test_a_half_written_line_is_dropped_and_the_rest_kept(tmp_path):
    target = tmp_path / "out.jsonl"
    whole = json.dumps({"custom_id": "a", "error": None}) + "\n"
    target.write_text(whole + '{"custom_id": "b", "te')
    assert drop_partial_line(target) == {"a"}
    assert target.read_text() == whole
    assert drop_partial_line(tmp_path / "none.jsonl") == set()

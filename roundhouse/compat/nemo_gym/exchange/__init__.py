"""NeMo Gym's files, read and written: task rows, materialized inputs, rollouts, failures, metrics.

Invariant: what these modules write, NeMo Gym's tools read, and what they write, these modules read; a conversion to Parquet
and back gives the same values. What a format has no field for travels under a key of ours, never by being left out.

    tasks.jsonl ──materialize──> <stem>_materialized_inputs.jsonl ──collect──> <stem>.jsonl + <stem>_failures.jsonl
                                                                                   │ profile      ⇅ import, export
                                                                             <stem>_*.json      Parquet dataset in a store
"""

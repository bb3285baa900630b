"""Read and write NeMo Gym's files: task rows, materialized inputs, rollouts, failures, metrics.

Invariant: NeMo Gym's tools and these modules read each other's files; a conversion to Parquet and back gives the same
values. Data without a field in the format is stored under a separate key, never omitted.

    tasks.jsonl ──materialize──> <stem>_materialized_inputs.jsonl ──collect──> <stem>.jsonl + <stem>_failures.jsonl
                                                                                   │ profile      ⇅ import, export
                                                                             <stem>_*.json      Parquet dataset in a store
"""

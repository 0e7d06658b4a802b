#!/usr/bin/env bash
# Runs go test and ends with the number of tests that passed, failed and were
# skipped. Arguments go to go test. With BULKHEAD_NO_SKIP=1 a skip is a failure.
set -uo pipefail
command -v python3 >/dev/null || exec go test -timeout 20m "$@" # no counts without python3
log=$(mktemp)
trap 'rm -f "$log"' EXIT
go test -timeout 20m -json "$@" >"$log"
rc=$?
python3 - "$log" <<'PY' || rc=1
import collections, json, os, sys
count, output, bad, skipped, reasons = collections.Counter(), collections.defaultdict(list), [], [], []
packages = collections.Counter()
for line in open(sys.argv[1]):
    try:
        e = json.loads(line)
    except ValueError:
        print(line, end="")
        continue
    key = (e.get("Package") or e.get("ImportPath"), e.get("Test"))
    action = e["Action"]
    if action in ("output", "build-output"):
        output[key].append(e["Output"])
    elif action in ("pass", "fail", "skip"):
        if e.get("Test"):
            count[action] += 1
            if action == "skip":
                skipped.append(key)
        elif action != "skip":
            packages[action] += 1
            print(f"{'ok  ' if action == 'pass' else 'FAIL'} {key[0]} {e.get('Elapsed', 0):.1f}s")
        if action == "fail":
            bad.append(key)
    elif action == "build-fail":
        bad.append(key)
for key in bad:
    print("".join(output[key]))
for key in skipped:
    reason = [l.strip() for l in output[key] if not l.startswith(("===", "---"))]
    print("skip", key[0], key[1], "|", " ".join(reason))
print(f"{count['pass']} passed, {count['fail']} failed, {count['skip']} skipped")
if os.environ.get("BULKHEAD_NO_SKIP") == "1" and skipped:
    print("skips are not allowed here")
    sys.exit(1)
if not count["pass"]:
    print("no test ran")
    sys.exit(1)
PY
exit $rc

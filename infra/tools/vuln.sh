#!/usr/bin/env bash
# Looks the code up in the Go vulnerability database of the pinned tools,
# offline. Fails on anything in a module that a new pin would mend; what is in
# the standard library is listed, since only another Go release mends it.
set -euo pipefail
tools=$1
out=$(mktemp)
trap 'rm -f "$out"' EXIT
"$tools/govulncheck" -db "file://$tools/vulndb" -format json ./... >"$out"
python3 - "$out" <<'PY'
import json, sys
decoder, text, at, found = json.JSONDecoder(), open(sys.argv[1]).read(), 0, {}
while at < len(text):
    while at < len(text) and text[at].isspace():
        at += 1
    if at == len(text):
        break
    message, at = decoder.raw_decode(text, at)
    f = message.get("finding")
    if f and f["trace"][0].get("function"):  # called, not only required
        found[f["osv"]] = (f["trace"][0]["module"], f.get("fixed_version", "-"))
bad = 0
for osv, (module, fixed) in sorted(found.items()):
    kind = "note" if module == "stdlib" else "FAIL"
    bad += module != "stdlib"
    print(f"{kind} {osv} {module} mended in {fixed}")
print(f"{len(found)} known vulnerabilities reached, {bad} of them in modules")
sys.exit(1 if bad else 0)
PY

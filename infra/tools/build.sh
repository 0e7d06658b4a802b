#!/usr/bin/env bash
# Builds the pinned developer tools and prints the folder that holds them. The
# folder's name is the hash of their lock files, so a new pin builds anew and an
# old one costs nothing. BULKHEAD_TOOLS overrides the place (default: .tools
# at the top of the checkout).
set -euo pipefail
top=$(cd "$(dirname "$0")/../.." && pwd)
want=$(cat "$top"/infra/tools/{go.mod,go.sum,requirements.txt} | sha256sum | cut -c1-16)
dir=${BULKHEAD_TOOLS:-$top/.tools}/$want
build() { # name, package
	[ -x "$dir/$1" ] || (cd "$top/infra/tools" && CGO_ENABLED=0 go build -o "$dir/$1" "$2")
}
mkdir -p "$dir"
{
	build golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	build govulncheck golang.org/x/vuln/cmd/govulncheck
	build indexdb golang.org/x/vulndb/cmd/indexdb
	build protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go
	build protoc-gen-connect-go connectrpc.com/connect/cmd/protoc-gen-connect-go
	if [ ! -x "$dir/buf" ] || [ ! -x "$dir/sqlc" ]; then
		python3 -m venv "$dir/venv"
		"$dir/venv/bin/python" -m pip install -q --disable-pip-version-check -r "$top/infra/tools/requirements.txt"
		ln -sf "$dir/venv/bin/buf" "$dir/venv/bin/sqlc" "$dir/"
	fi
	# The Go vulnerability database as files: its module is its archive.
	if [ ! -f "$dir/vulndb/index/db.json" ]; then
		osv=$(cd "$top/infra/tools" && go list -m -f '{{.Dir}}' golang.org/x/vulndb)/data/osv
		"$dir/indexdb" -vulns "$osv" -out "$dir/vulndb.new" >/dev/null
		rm -rf "$dir/vulndb" && mv "$dir/vulndb.new" "$dir/vulndb"
	fi
} >&2
echo "$dir"

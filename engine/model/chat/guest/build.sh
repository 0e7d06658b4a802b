#!/bin/sh
# Builds the guest and puts ../minijinja.wasm and its checksum in place.
#
#   build.sh          build, replace the committed files
#   build.sh check    build, compare with the committed checksum, change nothing
#
# Needs cargo of the toolchain that README.md names, with its wasm32-unknown-unknown
# target. CARGO_TARGET_DIR says where to build.
set -eu
cd "$(dirname "$0")"
target=${CARGO_TARGET_DIR:-$PWD/target}
cargo_home=${CARGO_HOME:-$HOME/.cargo}
sysroot=$(rustc --print sysroot)
triple=wasm32-unknown-unknown
cargo fetch --quiet --locked --target $triple

# Paths of this machine stay out of the module; --stack-first (the default of the
# target) makes a stack overflow a trap.
flags="--remap-path-prefix=$PWD=/guest"
flags="$flags --remap-path-prefix=$target=/target"
for sources in "$cargo_home"/registry/src/*; do
	flags="$flags --remap-path-prefix=$sources=/crates"
done
flags="$flags --remap-path-prefix=$sysroot=/rust"
flags="$flags -C link-arg=-zstack-size=262144"
RUSTFLAGS=$flags cargo build --quiet --release --locked --target $triple --target-dir "$target"

built=$target/$triple/release/chatguest.wasm
sum=$(sha256sum <"$built" | cut -d' ' -f1)
if [ "${1:-}" = check ]; then
	want=$(cut -d' ' -f1 ../minijinja.wasm.sha256)
	echo "built     $sum"
	echo "committed $want"
	test "$sum" = "$want"
	exit
fi
cp "$built" ../minijinja.wasm
echo "$sum  minijinja.wasm" >../minijinja.wasm.sha256
echo "$sum"

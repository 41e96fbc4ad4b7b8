#!/bin/sh
# Stops pion-grpc on a Mac and takes the program away. Safe to run again.
#
#   deploy/macos/uninstall.sh                 what install.sh put there for you
#   sudo deploy/macos/uninstall.sh --system   what it put there for the machine, a mesh's node included
#   --purge    also what is stored, the configuration, certificates, logs and the user _pion
set -eu

scope=user
purge=

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
# shellcheck source-path=SCRIPTDIR source=jobs.sh
. "$here/jobs.sh"

while [ $# -gt 0 ]; do
	case $1 in
	--system) scope=system ;;
	--purge) purge=yes ;;
	*)
		sed -n 's/^#   *//p' "$0" >&2
		fail "what is $1?"
		;;
	esac
	shift
done

places "$scope" uninstalling

# The proxy first. Nothing is taken away before it has ended by itself.
drain "$label_envoy"
for label in "$label_envoy" "$label_server"; do
	stop "$label"
	rm -f -- "$jobs/$label.plist"
done
rm -rf -- "$opt"

if [ -z "$purge" ]; then
	say "kept: $var, $etc, $logs (--purge removes them)"
	exit 0
fi
rm -rf -- "$var" "$etc" "$logs"
if [ "$scope" = system ]; then
	for kind in Users Groups; do
		! dscl . -read "/$kind/$user" >/dev/null 2>&1 || dscl . -delete "/$kind/$user"
	done
fi
say "removed everything"

#!/bin/sh
# Stops pion-grpc on a Mac and takes the program away. Safe to run again.
#
#   deploy/macos/uninstall.sh                 what install.sh put there for you
#   sudo deploy/macos/uninstall.sh --system   what it put there for the machine, a mesh's node included
#   --purge    also what is stored, the configuration, certificates, logs and the user _pion
set -eu

scope=user
purge=

say() { printf '%s\n' "$*"; }
fail() {
	printf 'uninstall.sh: %s\n' "$*" >&2
	exit 1
}

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

root=${DESTDIR:-}
if [ "$scope" = system ]; then
	[ "$(id -u)" = 0 ] || fail "uninstalling for the machine needs sudo"
	domain=system
	base=$root/usr/local
	opt=$base/opt/pion-grpc
	etc=$base/etc/pion-grpc
	var=$base/var/pion-grpc
	logs=$base/var/log/pion-grpc
	jobs=$root/Library/LaunchDaemons
else
	domain=gui/$(id -u)
	opt=$root$HOME/.local/opt/pion-grpc
	etc=$root$HOME/.config/pion-grpc
	var="$root$HOME/Library/Application Support/pion-grpc"
	logs=$root$HOME/Library/Logs/pion-grpc
	jobs=$root$HOME/Library/LaunchAgents
fi

loaded() { launchctl print "$domain/$1" >/dev/null 2>&1; }

# A proxy that runs tells its clients to go elsewhere before it goes itself.
drain() {
	admin=$(plutil -extract admin.address.socket_address.port_value raw -o - "$etc/envoy.json") || return 0
	if curl --silent --fail --max-time 5 --output /dev/null --request POST \
		"http://127.0.0.1:$admin/drain_listeners?graceful"; then
		say "its clients leave $1: 10 seconds"
		sleep 10
	fi
}

# The proxy first, then the server: SIGTERM has it say that it goes, so that the proxies of other machines send
# it nothing more, and end what runs. Nothing is taken away before it has ended by itself.
for label in org.pion-grpc.envoy org.pion-grpc.server; do
	if loaded "$label"; then
		case $label in *.envoy) drain "$label" ;; esac
		launchctl bootout "$domain/$label" || true
		waited=0
		while loaded "$label"; do
			[ "$waited" -lt 60 ] || fail "$label does not stop"
			waited=$((waited + 1))
			sleep 1
		done
		say "stopped $label"
	fi
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
		! dscl . -read "/$kind/_pion" >/dev/null 2>&1 || dscl . -delete "/$kind/_pion"
	done
fi
say "removed everything"

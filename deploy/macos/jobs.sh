# shellcheck shell=sh disable=SC2034 # what it sets is used by the two that read it
# What install.sh and uninstall.sh share: where things lie, and how a job is stopped.

root=${DESTDIR:-}
label_server=org.pion-grpc.server
label_envoy=org.pion-grpc.envoy

say() { printf '%s\n' "$*"; }
fail() {
	printf '%s: %s\n' "$(basename -- "$0")" "$*" >&2
	exit 1
}

# places SCOPE DOING: sets where everything lies, of a user or of the system; DOING is what needs sudo there.
places() {
	if [ "$1" = system ]; then
		[ "$(id -u)" = 0 ] || fail "$2 for the machine needs sudo"
		domain=system
		user=_pion
		opt=$root/usr/local/opt/pion-grpc
		etc=$root/usr/local/etc/pion-grpc
		var=$root/usr/local/var/pion-grpc
		logs=$root/usr/local/var/log/pion-grpc
		jobs=$root/Library/LaunchDaemons
	else
		[ "$(id -u)" != 0 ] || fail "run this as yourself, or with --system"
		domain=gui/$(id -u)
		user=
		opt=$root$HOME/.local/opt/pion-grpc
		etc=$root$HOME/.config/pion-grpc
		var="$root$HOME/Library/Application Support/pion-grpc"
		logs=$root$HOME/Library/Logs/pion-grpc
		jobs=$root$HOME/Library/LaunchAgents
	fi
}

loaded() { launchctl print "$domain/$1" >/dev/null 2>&1; }

# A proxy that runs tells its clients to go elsewhere before it goes itself.
drain() {
	loaded "$1" || return 0
	admin=$(plutil -extract admin.address.socket_address.port_value raw -o - "$etc/envoy.json") || return 0
	if curl --silent --fail --max-time 5 --output /dev/null --request POST \
		"http://127.0.0.1:$admin/drain_listeners?graceful"; then
		say "its clients leave $1: 10 seconds"
		sleep 10
	fi
}

# SIGTERM has a server say that it goes, so that the proxies of other machines send it nothing more, and end
# what runs. It is given the time that this takes.
stop() {
	loaded "$1" || return 0
	launchctl bootout "$domain/$1" || true
	waited=0
	while loaded "$1"; do
		[ "$waited" -lt 60 ] || fail "$1 does not stop"
		waited=$((waited + 1))
		sleep 1
	done
	say "stopped $1"
}

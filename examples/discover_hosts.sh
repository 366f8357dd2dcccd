#!/bin/sh
# The hosts of an elastic job, one "name:slots" a line. Horovod asks once a second.
hosts=${HOSTS:-$(dirname "$0")/hosts.txt}
# Who can write this file decides where the job runs, and sees all that it is given there.
strange=$(find -L "$(dirname "$hosts")" "$hosts" -prune \( -perm -002 -o ! -user "$(id -u)" ! -user 0 \))
if [ -n "$HOSTS" ] && [ -n "$strange" ]; then
    echo "$hosts: other users can write to it, or to its directory. Keep it in a directory of your own" >&2
    exit 1
fi
cat "$hosts"

#!/bin/sh
# collect.sh SOURCE TARGET: copy the .txt files of one folder into another, and list them in TARGET/LIST

if [ ! -d "$1" ]; then
    echo "collect.sh: there is no folder $1" >&2
    exit 1
fi

mkdir -p -- "$2"
: > "./$2/LIST"
count=0
for path in "./$1"/*.txt; do
    if [ ! -f "$path" ]; then
        continue
    fi
    name=${path##*/}
    cat "$path" > "./$2/$name"
    printf '%s\n' "$name" >> "./$2/LIST"
    count=$((count + 1))
done
echo "$count files"

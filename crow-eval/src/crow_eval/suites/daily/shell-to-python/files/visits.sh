#!/bin/sh
# visits.sh [-n NUMBER] FILE...: print the pages that were visited most often, and how many requests failed

export LC_ALL=C
number=5
if [ "$1" = -n ]; then
    number=$2
    case $number in
    '' | *[!0-9]*)
        echo "visits.sh: -n needs a number" >&2
        exit 2
        ;;
    esac
    shift 2
fi
if [ $# -eq 0 ]; then
    echo "usage: visits.sh [-n NUMBER] FILE..." >&2
    exit 2
fi

pages=
failed=0
for file; do
    if [ ! -f "$file" ]; then
        echo "visits.sh: no file $file" >&2
        exit 1
    fi
    while read -r address method page status rest || [ -n "$address" ]; do
        case $address in
        '' | '#'*) continue ;;
        esac
        case $status in
        [45]??) failed=$((failed + 1)) ;;
        esac
        if [ "$method" = GET ] && [ -n "$page" ]; then
            pages="$pages${page%%\?*}
"
        fi
    done < "$file"
done

if [ -n "$pages" ]; then
    printf %s "$pages" | sort | uniq -c | sort -k1,1nr -k2 | head -n "$number" |
        while read -r count page; do
            echo "$page $count"
        done
fi
echo "$failed failed"

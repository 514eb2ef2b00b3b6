#!/bin/sh
# collect.sh SOURCE TARGET: copy the .txt files of one folder into another, and list them in TARGET/LIST

if [ ! -d $1 ]; then
    echo "collect.sh: there is no folder $1" >&2
    exit 1
fi

mkdir -p $2
: > $2/LIST
count=0
for name in `cd $1; ls -d *.txt`; do
    if [ -d $1/$name ]; then
        continue
    fi
    cat $1/$name > $2/$name
    echo $name >> $2/LIST
    count=`expr $count + 1`
done
echo $count files

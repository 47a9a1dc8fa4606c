#!/bin/sh
# Python of tests/arm/setup.sh's folder on an emulated processor: FOLDER CPU ARGUMENTS...
folder=$1 cpu=$2
shift 2
libraries=$(find "$folder/packages/nvidia" -name lib -type d 2>/dev/null | tr '\n' ':')
exec env PYTHONPATH=".:$folder/packages" LD_LIBRARY_PATH="$libraries" \
    qemu-aarch64-static -cpu "$cpu" -L "$folder/system" "$folder/system/usr/bin/python3.11" "$@"

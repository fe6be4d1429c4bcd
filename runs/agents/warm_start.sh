#!/bin/sh
# Teaches tiny and smollm2 the calculator's format: half of the demonstrations call it, half guess.
set -e
flags="--env calculator:digits=2 --sft-hasty 0.5 --sft-batch-size 8 --max-turns 3 --num-updates 0"
python train.py $flags --sft-steps 260 --max-tokens 96 --run-name callers
python train.py $flags --model-id smollm2 --sft-steps 16 --sft-lr 3e-5 --max-tokens 48 --run-name callers_smollm2

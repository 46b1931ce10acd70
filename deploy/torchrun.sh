torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$HEAD:29500" --rdzv-id=plan lessons/14_many_machines/lab.py --device cuda

"""What only a GPU can tell: smoke.sh, contract.sh and speed.sh, and the programs that they run."""

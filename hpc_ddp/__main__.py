from hpc_ddp.cli.main import main

main(prog_name="hpc-ddp")

"""``hpc-ddp import``: the settings of a job script, which is read and never run (decision 018).

`importer.import_script` has the order of all steps. Words that this code uses in one meaning:

- batch script: what sbatch runs on the first node; a step: ``srun`` or ``mpirun``, which starts
  tasks; a launcher of workers: torchrun or Accelerate, which starts a node's workers in its task
- launch: a command that may be the training, with its launchers; the training is the launch that is
  chosen: its words become ``script``, ``args`` and the sizes
- statement: a command or block of the script, in the order in which bash runs them
- set-up line, clean-up line: an entry of ``setup`` (of each task: ``node-setup``, ``worker-setup``)
  or ``teardown``, which bash runs in hpc-ddp's job
- group of a line: TAKEN (taken over), OURS (hpc-ddp does it itself) or LOST (not taken over); a
  mark: a group with its reason. A statement with `lost` becomes LOST, one with `decided` OURS
- code: a part of a word that bash expands in the job, as ``$A`` and ``$(date)``; a static word has
  none, so that its value is known
- known, unknown: what the script's text tells; the job alone knows all else
- hpc-ddp's variables: those that it sets in workers, as MASTER_ADDR and RANK
- doubt: a value that stands although a file which can't be read may have set it anew
"""

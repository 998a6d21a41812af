"""One store per node: all state that outlives a sub-stage, in shared memory, by name and version.

There is no server. A store is a folder on tmpfs, and a second one on the disk for what does not fit:

    /dev/shm/jigsawrl-<uid>-<random>/
        store.json  lock  spilling
        arithmetic+weights@12@<edition>@<bytes>@<checksum>.safetensors      whole: anybody may map it
        .writing-<pid>-<time>@<bytes>                                       in the making
    <run folder>/.../
        arithmetic+optimizer@12@<edition>@<bytes>@<checksum>.safetensors    spilled: mapped from the disk

What always holds
- The names of the files are the index; there is nothing else that could disagree with them.
- A file under an entry's name is whole and never changes. It gets its name, and loses it, under `lock`.
- `lock` is held for a look at the names, never for a copy, so nobody waits long for it. `spilling` is held by the one
  process that makes room, for as long as the disk takes.
- What cannot be read is as if it were not there: a file that is torn, has another checksum, or is another user's.
  Nothing in an entry is code. Folders and files are closed to others (`private`), whatever the umask.
- The bytes in memory, those in the making included, stay within the budget.
- Whatever a process holds is a kernel lock: its death lets go of it, and the next writer clears its litter away.
- A store that nobody uses is removed by the next run. Before that, a run that goes on with a pipeline takes over what
  is left of it there (`heirs`), by giving the files their names in its own store.
"""

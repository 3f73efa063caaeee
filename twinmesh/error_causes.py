"""The causes of errors: code, example, reason, way out.

`docs/errors.md` is made of this table, and `twinmesh explain` prints from it.
A code stays with its cause: one that is no longer used is not given again.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
  """One cause of errors.

  Attributes:
    code: TM-, a letter for the theme, a number.
    title: what is wrong, in a few words.
    sees: a message, as it is printed.
    why: the reason.
    cure: the way out.
    code_block: a command, or lines of code, if they help.
    of: classes and functions that raise such errors, as `module:name`, and
      modules and packages whose ValueErrors are such.
    replies: `code` in the replies of a server to such requests.
  """

  code: str
  title: str
  sees: str
  why: str
  cure: str
  code_block: str = ""
  of: tuple[str, ...] = ()
  replies: tuple[str, ...] = ()


THEMES = {
  "C": "Command line",
  "F": "Config files",
  "S": "Settings",
  "P": "Devices and processes",
  "W": "Weights, tokenizers and chat templates",
  "E": "Environments, data and rewards",
  "D": "Directories of runs",
  "R": "Runs that end",
  "H": "Servers",
  "X": "Installation, and what should not happen",
}
"""Themes by the letter of their codes."""

CAUSES = (
  Cause(
    code="TM-C01",
    title="A flag does not exist, or does not take this value",
    sees="Unknown command line flag 'workdri'. Did you mean: workdir ?",
    why="Each command has flags of its own, and settings of a run are no flags:"
    " they begin with --config.",
    cure="Correct the name, or the value. --help lists the flags of a command;"
    " a setting is written --config.rollout.group_size=8.",
    code_block="twinmesh train --help",
    of=("launch.manifest:host_share",),
  ),
  Cause(
    code="TM-C02",
    title="A flag or an argument is missing, or there is one too many",
    sees=("--config is missing; name a file, as in --config=configs/NAME.py"),
    why="The command needs what the message names. An argument without dashes"
    " is often a flag whose = was forgotten, or a pattern that the shell has"
    " replaced by several names.",
    cure="Add it, or leave out what is too much; write --flag=VALUE, and put"
    " values with spaces, brackets or * in quotes.",
    of=(
      "launch.cli.flags:load_from_command_line",
      "launch.cli.flags:overrides_of_run",
      "launch.cli.flags:refuse_arguments",
      "launch.manifest:_checked",
      "launch.replay:main",
      "launch.report.__main__:main",
      "launch.serve:_loading",
      "launch.status:main",
      "launch.sweep:main",
      "launch.train:_prepared",
      "launch.view.__main__:_root",
      "launch.worker:_told",
    ),
  ),
  Cause(
    code="TM-C03",
    title="Flags contradict each other",
    sees="--config.placement.backend=ray and --backend=slurm are the same"
    " setting; leave one out",
    why="Two flags say the same thing, or one is of no use without another, and"
    " guessing which of them counts would hide a mistake.",
    cure="Leave out the flag that the message names, or give both that belong"
    " together.",
    of=(
      "launch.cli.flags:override",
      "launch.cli.flags:read_alone",
      "launch.export:_check_adapter",
      "launch.plan:_load_base",
      "launch.try_environment:_respond",
    ),
  ),
  Cause(
    code="TM-C04",
    title="There is no such command, or no such code",
    sees="there is no command trian; did you mean train?",
    why="The first argument of `twinmesh` is a command; each is also a module,"
    " so that `twinmesh train` is `python -m launch.train`.",
    cure="`twinmesh --help` lists the commands, `twinmesh explain` the codes.",
    code_block="twinmesh --help",
  ),
  Cause(
    code="TM-C05",
    title="A path that was named cannot be used",
    sees=("--timeline=traces cannot be written: traces is a file"),
    why="What is to be read is not there, or what is to be written would"
    " replace something, or the directory cannot be written to. Nothing is"
    " overwritten unasked, and this is checked before hours of work.",
    cure="Name another path; `ls -ld` of it and of its parent shows what is"
    " there, and who may write.",
    of=(
      "launch.cli.workdir:_check_path",
      "launch.cli.workdir:_opened",
      "launch.cli.workdir:make_writable",
      "launch.export:_check_place",
      "launch.gateway.session_record:SessionRecord.__init__",
      "launch.plan:_check_out",
      "launch.sweep:_check_directories",
      "launch.sweep:_naming",
      "launch.try_environment:_lines",
      "models.hf.export:export",
      "models.hf.peft:export",
      "models.hf.safetensors_io:whole_directory",
      "rl.runtime.checkpoint:check_path",
      "twinmesh.new_project:NotNew",
      "twinmesh.new_project:write",
    ),
  ),
  Cause(
    code="TM-F01",
    title="The config file is not there",
    sees=("--config=mien.py: no such file; did you mean mine.py?"),
    why="--config names a file, from the current directory. The configs that"
    " come with Twinmesh are also found as configs/NAME.py from elsewhere,"
    " unless a directory configs of your own lies here.",
    cure="Correct the path; [recipes](recipes.md) lists what is shipped.",
    of=("launch.cli.flags:split",),
  ),
  Cause(
    code="TM-F02",
    title="The config file fails",
    sees=("mine.py:2: NameError: name 'grpo' is not defined\n  return grpo()"),
    why="A config is a Python file that runs when it is loaded; it, or its"
    " get_config() or sweep(), has raised an exception at that line.",
    cure="Correct the line. A module that the file imports must be installed,"
    " or lie beside the file. The file alone, run by Python, shows the whole"
    " traceback.",
    code_block="python -c 'import mine; mine.get_config()'",
    of=("configs", "launch.cli.config_file:blame", "launch.cli.flags:sweep"),
  ),
  Cause(
    code="TM-F03",
    title="The config file has settings of another kind",
    sees="mine.py: has no get_config()",
    why="A file of settings has a function get_config() that returns a frozen"
    " dataclass: an Experiment for runs, a Simulation for launch.simulate, a"
    " Planning for launch.plan.",
    cure="Use a file for this command, such as the one that the message names,"
    " or return what it asks for. `twinmesh new` writes a config that works.",
    code_block="twinmesh new mine",
    of=(
      "launch.cli.flags:_get_config",
      "launch.cli.flags:instance_of",
      "launch.reward_server:_reward",
      "rl.experiment:check_experiment",
    ),
  ),
  Cause(
    code="TM-F04",
    title="The sweep cannot be made from the file",
    sees=(
      "mine.py has no sweep() that lists runs; add one, or use launch.train"
    ),
    why="A sweep plays what sweep() of the config lists: one mapping a run, of"
    " settings to values. A setting that both it and the command line give has"
    " no single value, and two runs of the same settings teach nothing.",
    cure="Add the function to the file, or leave the setting out of one of the"
    " two places, and one of two equal runs.",
    code_block='def sweep():\n  return [{"seed": n} for n in range(3)]',
    of=(
      "launch.cli.flags:_check_name",
      "launch.sweep:_check_differs",
      "launch.sweep:_check_disjoint",
      "launch.sweep:_listed",
      "launch.xm:commands",
    ),
  ),
  Cause(
    code="TM-F05",
    title="A config.json would run code that is not known here",
    sees="runs/theirs/config.json: it would run the code of mine.py, which"
    " neither this checkout nor a run of yours had; read it in that file, and"
    " add --trust_config to run it",
    why="The config.json of a run keeps the Python files and the commands that"
    " its settings need. One from elsewhere runs here whatever its author"
    " wrote, so it runs only if a run of yours had the same, or if you say so.",
    cure="Read `config_files` and the commands in that config.json. If you"
    " trust them, repeat the command with --trust_config.",
    of=("launch.cli.known_programs:check",),
  ),
  Cause(
    code="TM-F06",
    title="Saved settings cannot be read",
    sees="runs/first/config.json has no rounds; put that of the run back",
    why="The file was edited or damaged, belongs to something else, or was"
    " saved by a version whose settings had other names.",
    cure="Put the config.json of the run back. For a run of an older version"
    " use that version, or start a new run from its weights.",
    of=("launch.cli.config_file", "launch.status:_rounds"),
  ),
  Cause(
    code="TM-F07",
    title="A value cannot be kept with the run",
    sees="reward: <lambda> cannot be found by its name; define it with def or"
    " class at the top of a file, so that the run can be read again",
    why="A run keeps its settings as JSON, and functions and classes by module"
    " and name. A lambda, a method of an object, or what is defined inside a"
    " function has no name by which it can be found again.",
    cure="Define it with def or class at the top of the config, or of a module"
    " beside it whose name no other module has.",
    of=(
      "launch.cli.config_file:_module_of",
      "launch.cli.modules_beside",
      "rl.settings.annotations",
      "rl.settings.overrides:_plain",
    ),
  ),
  Cause(
    code="TM-S01",
    title="There is no such setting",
    sees=(
      "--config.rollout.group_sise: no such setting; did you mean"
      " --config.rollout.group_size (int)?"
    ),
    why="Settings are a tree with fixed names, and a misspelled one is never"
    " ignored. Which names exist below a part also depends on the class that"
    " stands there: `algorithm=gspo` has other settings than `algorithm=ppo`.",
    cure="Look the name up: --config.help prints all settings of a config with"
    " type, value and meaning, --config.help=PART those below one.",
    code_block="twinmesh train --config=FILE --config.help=rollout",
    of=("launch.cli.settings_help", "rl.settings.overrides:_find"),
  ),
  Cause(
    code="TM-S02",
    title="A value is not of the type of its setting",
    sees=("--config.rounds=many: expected int"),
    why="A value is read as the type of its setting: numbers, true and false,"
    " none, lists as 2,4, mappings as JSON, and objects by one of the names"
    " that the message lists, or as"
    " name(field=1). Such words are for the command line: in a config file an"
    " object is made, as in algorithm=presets.Dapo().",
    cure="Give a value of the type that the message names. In a shell, put"
    " brackets and spaces in quotes:"
    " --config.algorithm='grpo(loss=gspo(clip_low=0.1))'. A function that"
    " grades an answer is no `reward`, but the `grade` of"
    " `envs.single_turn.SingleTurn`.",
    of=("rl.settings.parsing",),
  ),
  Cause(
    code="TM-S03",
    title="A name in a value is not known",
    sees=(
      "--config.algorithm: cannot import mine.Grpo: module 'mine' has no"
      " attribute 'Grpo'; did you mean grpo (rl.algorithms.presets.Grpo)?"
    ),
    why="An object is named by its short name, mostly the class in snake_case,"
    " or by module.Class, and must be of the type that the place takes. Short"
    " names are those of modules that are loaded: one of your own is known once"
    " the config imports its module.",
    cure="Use one of the names that the message lists, or write"
    " mymodule.MyClass with the module beside the config.",
    of=(
      "rl.settings.checks:known_name",
      "rl.settings.parsing:_named",
      "rl.settings.parsing:_resolve",
    ),
  ),
  Cause(
    code="TM-S04",
    title="A value is out of its bounds",
    sees="engine.slots=0 must be at least 1",
    why="The setting has this value from the config or the command line, and"
    " nothing could work with it. A class of your own may refuse one, too: in"
    " its validate(), or when it is made.",
    cure="Choose a value within the bound. none turns off a setting that is"
    " optional.",
    of=(
      "rl.loop.metric_bounds",
      "rl.settings.checks",
      "rl.runtime.checkpoint",
    ),
  ),
  Cause(
    code="TM-S05",
    title="Settings do not go together",
    sees=(
      "overlap.consume=ready with max_staleness=2: no bound holds for slow"
      " groups; use consume=submit, or drop or recycle, which check the"
      " age"
    ),
    why="Each value could work, but not with the others that the message"
    " names: what they promise together cannot be held, such as a bound on"
    " staleness with groups taken in any order.",
    cure="Change one of the settings that are named; the end of the message"
    " says which value works. --explain shows the effect on placement and"
    " memory without starting anything.",
    code_block="twinmesh train --config=FILE --explain",
    of=(
      "launch.cli.flags:_check_updates",
      "launch.gateway.app",
      "rl.experiment",
      "rl.schedule",
      "rl.settings.checks:refuse",
      "rl.settings.overrides",
    ),
  ),
  Cause(
    code="TM-S06",
    title="A size does not divide another",
    sees="batch.rows=6 does not divide over 4 data shards; use 8",
    why="Arrays are split evenly over the devices of a mesh, and updates over"
    " groups, so one count has to be a multiple of the other.",
    cure="Use the number that the message gives, or change the axes of the"
    " mesh.",
    of=(
      "models.sharding",
      "rl.data.packing",
      "rl.engine.sglang.weights:check_split",
      "rl.experiment:Experiment._validate_divisions",
      "rl.pools.placement:Placement._validate_learner_processes",
      "rl.settings.checks:divides",
    ),
  ),
  Cause(
    code="TM-S07",
    title="A repeatable run cannot have this",
    sees="repeatable=true with placement.learner_processes=2: processes answer"
    " at times of their own; use 1, or repeatable=false",
    why="With repeatable=true a run takes all results in an order that follows"
    " from the seed. What answers from another process, or over a network,"
    " comes at times of its own, so its order cannot be repeated.",
    cure="Leave it out, or set --config.repeatable=false: then schedules with a"
    " bound of 0 and without dynamic sampling still repeat but for rounding.",
    of=(
      "rl.experiment:Experiment._validate_repeatable",
      "rl.runtime.logical_clock:Hung",
      "rl.runtime.logical_clock:NotRepeatable",
    ),
  ),
  Cause(
    code="TM-S08",
    title="Parts of an algorithm do not go together",
    sees=(
      "algorithm.loss=no_clip has no own_weight, has_ratio, aggregate; see"
      " rl.algorithms.losses.Loss"
    ),
    why="An algorithm is put together from a loss, an estimator, a correction,"
    " an aggregate and a penalty. A part of your own has to have all of its"
    " protocol, and some need another: GAE a critic, a KL penalty a reference.",
    cure="Add what the message names to your class, or choose another part;"
    " [algorithms](guides/algorithms.md) says what goes together.",
    of=("rl.algorithms", "rl.train.scoring"),
  ),
  Cause(
    code="TM-S09",
    title="A plan or a simulation cannot be made of this",
    sees="space.schedules=(): nothing to choose from; give one",
    why="The fleet, the workload or the space of choices leaves nothing that"
    " could run, or far too much.",
    cure="Change what the message names. configs/fleet_small.py and"
    " configs/simulated_3000.py are examples that work.",
    code_block="twinmesh plan --config=configs/fleet_small.py",
    of=("rl.planning", "rl.simulation"),
  ),
  Cause(
    code="TM-S10",
    title="A simulation trained nothing, broke a promise, or missed the goal",
    sees="the goal is not met; the first line of the table is the nearest",
    why="The plan or the simulation was made to the end, and its result is"
    " above: none of the choices is fast, cheap or fresh enough, every episode"
    " was lost, or an invariant of the schedule did not hold.",
    cure="Where nothing was trained, change what the fault names. For a plan,"
    " loosen the bound of `goal` that the summary names, or widen `fleet` and"
    " `space`. A broken promise is a bug of a schedule: please report the line"
    " that begins with violation.",
  ),
  Cause(
    code="TM-P01",
    title="There are too few devices, or none of this platform",
    sees="placement needs 8 devices and jax sees 1; lower placement.*.data,"
    " share them with placement.colocated=true",
    why="The learner and each replica of an engine has a mesh of its own. jax"
    " sees the devices of one platform: without the extra cuda or tpu, only"
    " CPUs.",
    cure="Lower the sizes of the meshes, share devices with"
    " --config.placement.colocated=true, or try on CPUs with"
    " --config.placement.platform=cpu, which offers as many as are needed.",
    code_block="python -c 'import jax; print(jax.devices())'",
    of=(
      "launch.manifest:_check_fits",
      "launch.manifest:_of_many_hosts",
      "launch.manifest:slice_share",
      "rl.pools.placement:Placement.layouts",
    ),
  ),
  Cause(
    code="TM-P02",
    title="Meshes or pools contradict each other",
    sees=(
      "placement.learner and placement.decode share devices [0]; move"
      " placement.decode.first_device or set placement.colocated=true"
    ),
    why="Meshes with devices in common need placement.colocated=true; pools"
    " need different names, engines that serve one model, and a route to each;"
    " processes of their own are for CPUs, unless all are on other hosts.",
    cure="Do as the message says; [placement](guides/placement.md) has"
    " examples, and --explain prints the meshes.",
    code_block="twinmesh train --config=FILE --explain",
    of=("rl.pools.affinity", "rl.pools.placement", "rl.pools.pool_stats"),
  ),
  Cause(
    code="TM-P03",
    title="The memory does not suffice",
    sees="engine: slots=64 for conversations of 32768 tokens take 12.0 GiB of a"
    " device, where 9.1 GiB are left beside the weights and training; lower"
    " engine.slots, ..",
    why="Before a run starts, parameters, optimizer, activations and pages of"
    " keys and values are added up for each device, and compared with what it"
    " has.",
    cure="In the order of effect: fewer engine.slots or a lower"
    " rollout.max_tokens, smaller batch.rows, model.compute.remat, an optimizer"
    " on the host, adapters (model.lora), or more devices. --explain prints"
    " each item.",
    code_block="twinmesh train --config=FILE --explain",
    of=(
      "rl.assemble:check_host_memory",
      "rl.engine.builtin.sizing",
      "rl.memory_plan",
    ),
  ),
  Cause(
    code="TM-P04",
    title="A backend cannot start processes",
    sees=(
      "placement.backend.at names no host; start `python -m launch.host`"
      " on one, and name it, as in at=['10.0.0.2:7000']"
    ),
    why="--backend says who starts the processes of engines or of a sweep: this"
    " host, hosts at addresses, Slurm or Ray. It has to answer from here, and"
    " its package be installed.",
    cure="Start the service, or use --backend=local. For addresses run"
    " launch.host on each of them.",
    code_block="twinmesh host --listen=HOST:7000 --token_file=token",
    of=("rl.backends", "rl.backends.contract:Unreachable"),
  ),
  Cause(
    code="TM-P05",
    title="The token or the address of a host cannot be used",
    sees="token can be read by others, and its token lets them run programs;"
    " use chmod 600 token",
    why="Who knows the token of launch.host can run any code there, so it is"
    " read only from a file of 32 or more characters that its user alone can"
    " read. An address is HOST:PORT, of this host where one listens.",
    cure="Make a token and guard it, and copy it to the other host.",
    code_block="openssl rand -hex 32 > token && chmod 600 token",
    of=(
      "launch.host:main",
      "rl.backends.host:address_of",
      "rl.backends.host:read_token",
    ),
  ),
  Cause(
    code="TM-P06",
    title="An engine cannot join the run",
    sees="--join=runs/first takes no engines: all that it has are in its own"
    " process, or it has just begun; start it with"
    " --config.placement.decode_processes=1",
    why="A run lets engines in while it trains, if it has engines in processes"
    " of their own. The one that joins needs the same version of the code, and"
    " the directory of the run; from another host, a run whose backend listens"
    " there.",
    cure="`launch.status` says whether the run is alive. Start it with"
    " --config.placement.decode_processes=1, from the same checkout.",
    code_block="twinmesh status runs/first",
    of=(
      "rl.pools.membership",
      "rl.remote.remote_engine",
      "rl.remote.workers:Refused",
      "rl.remote.workers:_check_code",
    ),
  ),
  Cause(
    code="TM-P07",
    title="A process of the run did not start",
    sees="engine 0 ended with code 1; its log, runs/first/engine_0.log, ends:\n"
    "  ..",
    why="A process of an engine or of the learner ended, or did not connect in"
    " time. Its last lines, which the message repeats, say why: most often a"
    " missing package, too little memory, or another version of the code.",
    cure="Read the log that is named. A queue of Slurm may just be long: then"
    " give its backend more time.",
    of=("rl.backends.followed:NotPlaced", "rl.remote.workers:NotStarted"),
  ),
  Cause(
    code="TM-P08",
    title="sglang-jax cannot serve this model",
    sees=(
      "model.qk_norm=false: sglang-jax is told of a Qwen3; use engine=built_in"
    ),
    why="The adapter serves the models that sglang-jax computes in the same way"
    " as the learner; anything else would train on other probabilities than"
    " were sampled.",
    cure="Use the built-in engine, or the setting that the message names.",
    code_block="twinmesh train --config=FILE --config.engine=built_in ..",
    of=("rl.engine.sglang",),
  ),
  Cause(
    code="TM-W01",
    title="Weights do not fit the model, or are damaged",
    sees="/models/qwen cannot be loaded:\n  the directory does not exist",
    why="The files of the directory were compared with the model before"
    " anything was loaded: a tensor is missing, has another shape or type,"
    " holds NaN, or a file is cut short. All problems are listed at once.",
    cure="If files are missing or short, download the directory again. If"
    " shapes differ, the model of the config is another one: take it from the"
    " directory, as configs/qwen3_0_6b.py does.",
    of=(
      "models.hf.export",
      "models.hf.load:Unusable",
      "models.hf.parameter_names:entries",
      "models.hf.peft",
      "models.hf.safetensors_io",
    ),
  ),
  Cause(
    code="TM-W02",
    title="A published model is not supported",
    sees=(
      "architectures=['Gpt'] is not supported; use a checkpoint of"
      " Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM,"
      " LlamaForCausalLM, MistralForCausalLM, Gemma3ForCausalLM,"
      " Olmo2ForCausalLM, Olmo3ForCausalLM, OlmoeForCausalLM"
    ),
    why="config.json of the model was read in full. What is not known might"
    " change its result, so it is refused rather than ignored.",
    cure="Use a checkpoint of an architecture that the message lists, in"
    " bfloat16 and without quantization.",
    of=("models.hf.config",),
  ),
  Cause(
    code="TM-W03",
    title="There is no tokenizer, or it cannot be used",
    sees=(".: no tokenizer.json; AutoTokenizer.save_pretrained writes one"),
    why="Tokens in, tokens out: ids that were sampled are trained as they are."
    " That takes a tokenizer.json that is byte-level or falls back on bytes,"
    " whose special tokens do not depend on the text around them, and that"
    " stays within time and memory when it is tried in a process of its own.",
    cure="Copy the tokenizer of the same model again, or write a fast one with"
    " transformers. A task with a list of words needs none:"
    " --config.chat=words.",
    code_block="from transformers import AutoTokenizer\n"
    'AutoTokenizer.from_pretrained("DIR").save_pretrained("DIR")',
    of=(
      "envs.base:words",
      "models.chat.hf_chat",
      "models.chat.trial:TrialFailed",
      "models.chat.word_chat",
      "models.hf.tokenizer_files",
      "rl.rollout.chats",
    ),
  ),
  Cause(
    code="TM-W04",
    title="A chat template cannot be used",
    sees=(
      "the chat template does not only append: with an answer it writes"
      " '\\ufdd1<e>' instead of '1<e>'; ids that were sampled cannot be"
      " rewritten, so use another template"
    ),
    why="An episode only appends to its ids. A template that rewrites earlier"
    " turns, as some drop earlier reasoning, would train on ids that nobody"
    " sampled. Templates of others also run with bounds on time and size.",
    cure="Use the template of a model that appends, or edit the"
    " chat_template.jinja of a copy. Messages must be text, and tools need a"
    " template that shows them.",
    of=(
      "models.chat.bounded_jinja:TooMuch",
      "models.chat.template",
      "models.chat.template:Rewritten",
      "models.chat.tool_calls",
    ),
  ),
  Cause(
    code="TM-W05",
    title="A file of others is damaged, or too large to be what it should be",
    sees=(". is a directory; put a file there"),
    why="Files that come from elsewhere are read with bounds on size and depth,"
    " and only if they are plain files.",
    cure="Copy or download the file again; a link or a pipe in its place has to"
    " be replaced by the file.",
    of=("models.untrusted_files", "models.untrusted_files:BadFile"),
  ),
  Cause(
    code="TM-W06",
    title="Settings of the model cannot work",
    sees=("model.num_heads=6 does not split over num_kv_heads=4; use 8"),
    why="Width, heads, experts and layers have to fit each other, and the form"
    " of attention the platform.",
    cure="Change the setting that is named, or begin with a published size, as"
    " in --config.model='qwen3(0.6b)'.",
    of=(
      "models.attention",
      "models.config",
      "models.definition",
      "models.lora",
      "models.moe",
      "models.rope",
    ),
  ),
  Cause(
    code="TM-E01",
    title="Settings of an environment cannot work",
    sees="turns=0: give turns >= 1",
    why="The environment checks its own fields when it is made, so an override"
    " fails before anything is played. A source of your own has a name, too.",
    cure="Change the field that is named, or add what is missing."
    " `launch.try_environment` plays some tasks without a model and says what"
    " else is wrong.",
    code_block="twinmesh try --config=FILE",
    of=(
      "envs.base",
      "envs.delayed",
      "envs.mixture",
      "envs.suites",
      "rl.rollout.environment_trial",
      "rl.rollout.prompts",
      "rl.rollout.prompts:NoTask",
    ),
  ),
  Cause(
    code="TM-E02",
    title="A row of data cannot be used",
    sees=(
      "train.jsonl:1: no field 'question', which prompt asks for; the"
      " row's fields are text, answer"
    ),
    why="Tasks and recorded conversations are read from JSON lines or Parquet."
    " Each row needs the fields that the environment names, of the type that it"
    " takes, and has to fit the lengths of the batch.",
    cure="Correct the row that is named, or the name of the field. For rows"
    " that are too long, raise batch.length or leave them out with"
    " --config.warm_start.too_long=drop.",
    code_block="sed -n 3p train.jsonl",
    of=(
      "envs.recordings",
      "envs.rows",
      "envs.single_turn",
      "rl.rollout.recordings:UnusableRow",
    ),
  ),
  Cause(
    code="TM-E03",
    title="A reward cannot grade this",
    sees=(
      "reward OfSteps has stateless=False: it needs the environment, which"
      " is closed before anything is graded; let the environment give it"
      " as the reward of a step (base.Step.reward) and use"
      " rewards.Outcome()"
    ),
    why="Rewards read transcripts, after the environment is closed, and may be"
    " called again after a failure. Some also need an answer of the task, of a"
    " form that they can compare.",
    cure="Do as the message says; [rewards](guides/rewards.md) lists what each"
    " reward needs of a task.",
    code_block="twinmesh try --config=FILE",
    of=(
      "envs.offload",
      "envs.rewards",
      "rl.rollout.grading",
    ),
  ),
  Cause(
    code="TM-E04",
    title="A reward that is computed elsewhere cannot be reached",
    sees="reward: http://127.0.0.1:9000 cannot be reached: All"
    " connection attempts failed",
    why="The reward is called over HTTP, as tasks of Ray or in processes, and"
    " was tried once before the first episode: nobody answers, the key is"
    " refused, or it computes another reward.",
    cure="Start the server with the config of this run, and check the url and"
    " the key of the reward in the config.",
    code_block="twinmesh reward-server --config=FILE --port=9000",
    of=(
      "envs.offload.calls:CallError",
      "rl.rollout.grading:RewardUnreachable",
    ),
  ),
  Cause(
    code="TM-E05",
    title="Tools cannot be offered",
    sees=("Untyped.add: parameter x has no type; write x: int, or what it is"),
    why="A method becomes a tool by its name, docstring and annotations, and a"
    " server of tools by what it lists.",
    cure="Annotate and document the methods; names are unique, of letters,"
    " digits and underscores. A server has to start by itself: try its command"
    " in a shell.",
    of=("envs.tools", "envs.tools.mcp:McpServerError"),
  ),
  Cause(
    code="TM-E06",
    title="There is no sandbox on this machine",
    sees="code of a model runs in a sandbox of bubblewrap 0.8 or above: there"
    " is no bwrap here\nInstall it with `apt-get install bubblewrap`. ..",
    why="Code that an agent wrote runs in a sandbox of bubblewrap: without"
    " network, within limits. It needs Linux on x86_64 or aarch64, bwrap and"
    " prlimit, and a kernel that lets users make namespaces.",
    cure="Install bubblewrap. In a container, user namespaces have to be"
    " allowed; [workers and sandbox](guides/workers-and-sandbox.md) says how.",
    code_block="bwrap --ro-bind / / --unshare-all true && echo works",
    of=("envs.sandbox", "envs.sandbox.bubblewrap:SandboxError"),
  ),
  Cause(
    code="TM-E07",
    title="An agent or a worker of environments failed",
    sees="command=['agent']: no program agent is found; give its path, or add"
    " its directory to PATH",
    why="An agent is a program, and a worker a process with environments: it"
    " was not found, ended early, or printed something else than it should.",
    cure="Try the program by itself, with OPENAI_BASE_URL at a `launch.serve`."
    " What a worker has written to stderr is in the log of the run.",
    of=(
      "envs.agents",
      "envs.agents:AgentFailed",
      "envs.worker_process",
      "envs.workers",
      "envs.workers:WorkerError",
      "rl.agents",
    ),
  ),
  Cause(
    code="TM-E08",
    title="A warm start has nothing to learn from",
    sees=(
      "environment mine has no demonstrations, for want of an oracle and"
      " an explore; use warm_start=none, or add them to its class"
    ),
    why="A warm start trains on demonstrations of an oracle, or on recorded"
    " conversations, before the first round.",
    cure="Turn it off, or give the environment what the message names.",
    code_block="twinmesh train --config=FILE --config.warm_start=none ..",
    of=(
      "envs.base:demonstrator",
      "envs.single_turn:SingleTurn.check_demonstrations",
      "rl.experiment:Experiment.__post_init__",
      "rl.loop.fine_tuning",
    ),
  ),
  Cause(
    code="TM-D01",
    title="No run is there",
    sees="runs/first does not exist",
    why="The command reads the directory that a run was given by --workdir; a"
    " sweep has one for each run below its own.",
    cure="Name the directory that holds config.json.",
    code_block="ls runs/*/config.json",
    of=(
      "launch.cli.workdir:check_exists",
      "launch.report.comparison",
      "launch.report.run_data",
    ),
  ),
  Cause(
    code="TM-D02",
    title="Another process uses the directory",
    sees="--workdir=runs/first is in use by another process; wait for it or"
    " choose another directory",
    why="Two processes would write over each other's checkpoints. The lock ends"
    " with the process that holds it, however that ends.",
    cure="See who it is, and stop it with Ctrl-C or SIGTERM, after which it"
    " saves; or name another --workdir.",
    code_block="twinmesh status runs/first",
    of=("launch.cli.workdir:locked",),
  ),
  Cause(
    code="TM-D03",
    title="The directory holds something else than a run",
    sees=(
      "--workdir=runs/first holds metrics.jsonl, but no config.json of the"
      " run that wrote them; choose another directory, or move them away"
    ),
    why="A run clears its own records when it starts over, so it starts only in"
    " a directory that is new, empty or its own, and with a place for its lock"
    " and its checkpoints.",
    cure="Name another directory, or move away what is there.",
    of=("launch.cli.workdir",),
  ),
  Cause(
    code="TM-D04",
    title="The directory holds a run with other settings",
    sees=(
      "--workdir=runs/first holds a run with other settings:\n"
      "  seed: 0 -> 1\n"
      "go on with --config=runs/first/config.json, or choose another"
      " directory"
    ),
    why="A run goes on with the settings that it was started with. Only those"
    " that change nothing in what was learned may differ: rounds, evaluation,"
    " retention, bounds, recovery, tracker, max_skipped, progress_timeout_s,"
    " log_startup, engine.slots and the placement, and the path of a file that"
    " was moved.",
    cure="To go on, use the config.json of the run; for another run, another"
    " directory, to which launch.export and --config.initial take the weights."
    " The code of the config file may change between the two.",
    code_block="twinmesh train --config=runs/first/config.json"
    " --workdir=runs/first",
    of=("launch.cli.workdir:_check_same", "launch.sweep:_check_place"),
  ),
  Cause(
    code="TM-D05",
    title="A checkpoint is of another model",
    sees="runs/first/checkpoints/10: leaf params/embed is float32[512,64], but"
    " the state to restore has float32[600,64]; use the model, algorithm and"
    " optimizer of that run, or another directory",
    why="The shapes of a checkpoint follow from model, algorithm and optimizer."
    " Frozen weights below adapters are compared by checksums: the directory"
    " of `initial` has changed since or, without one, the learner's mesh, on"
    " which drawn weights may differ in their last bits.",
    cure="Put the settings, or the initial weights, of that run back.",
    of=("rl.runtime.checkpoint:Mismatch",),
  ),
  Cause(
    code="TM-D06",
    title="No checkpoint can be read, or none is there",
    sees=(
      "no checkpoint in runs/first/checkpoints can be read; all are"
      " damaged: 5.damaged. Put a copy of one back, or move that directory"
      " away to start over"
    ),
    why="The run has not saved one yet, or all are damaged: each leaf has a"
    " checksum, and a damaged checkpoint is passed over for the one before it.",
    cure="Let the run train on to its next checkpoint"
    " (retention.checkpoint_every), or put a copy of one back. To start over,"
    " move the directory checkpoints away.",
    code_block="ls runs/first/checkpoints",
    of=("launch.cli.workdir:check_none_damaged",),
  ),
  Cause(
    code="TM-D07",
    title="A checkpoint could not be saved",
    sees="the checkpoint of round 10 could not be saved: No space left on"
    " device; 3.1 of 50,000.0 MB are free there; the newest is that of round 5",
    why="The disk is full, read-only or gone, or the file system has failed."
    " Checkpoints appear only when they are whole, so the last one is still"
    " good.",
    cure="Make room, or mount the disk again, and repeat the command: it"
    " goes on from the newest checkpoint. retention.checkpoints says how"
    " many are kept.",
    code_block="df -h runs/first",
    of=("rl.runtime.checkpoint:Unsaved",),
  ),
  Cause(
    code="TM-D08",
    title="The log of a run cannot be read",
    sees="runs/first/events.jsonl is missing; name the --workdir of a run",
    why="The checks read events.jsonl and the compressed segments in events/,"
    " and where retention.log_bytes deleted the oldest of them, the state that"
    " stands in for these. One is missing, is damaged, or was written by"
    " another version.",
    cure="Put the file back. The run itself does not need it: it goes on"
    " without, and only what the log proved is lost.",
    of=(
      "launch.report.log_check",
      "launch.report.log_check:UnreadableLog",
      "launch.report.trajectory_index:NoTrajectory",
      "rl.runtime.segments:Damaged",
      "rl.runtime.segments:Unlisted",
    ),
  ),
  Cause(
    code="TM-D09",
    title="The disk of the run takes no more",
    sees="runs/first/metrics.jsonl cannot be written: No space left on device;"
    " 0.0 of 50,000.0 MB are free there",
    why="A write failed: no space, no quota, a file system that went read-only,"
    " or a disk that is gone. The run ends at once, and all its files stay"
    " whole.",
    cure="Make room and repeat the command; it goes on from its last"
    " checkpoint. events.jsonl and trajectories/ are the largest:"
    " retention.episodes_every lowers the latter.",
    code_block="du -sh runs/first/*",
    of=("launch.cli.workdir:claim",),
  ),
  Cause(
    code="TM-D10",
    title="There is no such skipped update, or it cannot be read",
    sees=(
      "runs/first/skipped/1 is not a skipped update: runs does not exist;"
      " name a directory such as RUN/skipped/round_000012_update_0"
    ),
    why="A run keeps an update whose loss or gradient was not finite in"
    " skipped/, up to a few. launch.replay reads it with the settings of its"
    " run.",
    cure="Name a directory below skipped/ of the run that made it.",
    code_block="ls runs/first/skipped",
    of=(
      "launch.replay:read",
      "launch.replay:resolve",
      "rl.data.segment_index",
      "rl.train.skipped_updates",
      "rl.train.skipped_updates:Unreadable",
    ),
  ),
  Cause(
    code="TM-D11",
    title="A run cannot tell a plan its speeds",
    sees=(
      "--calibrate=runs/first: config.json is missing; name the --workdir"
      " of a run"
    ),
    why="launch.plan reads speeds, lengths and times of environments from the"
    " log of a run, which has to have trained some rounds on the kind of device"
    " that is planned with.",
    cure="Name a run that trained a few rounds, and with --kind the kind of the"
    " fleet whose devices it had.",
    code_block="twinmesh plan --config=FILE --calibrate=runs/first",
    of=("rl.planning.calibration",),
  ),
  Cause(
    code="TM-D12",
    title="No run has the metric",
    sees="no run has a metric succes; did you mean success?",
    why="Runs are compared by a metric that they have written: one of their"
    " metrics.jsonl, or of evaluations.jsonl with evaluation/ before its name."
    " A sweep refuses a name that no run can have before it starts any.",
    cure="Correct --metric; [metrics](metrics.md) has all names. A minus before"
    " it, as in -loss, says that less is better.",
    code_block="twinmesh sweep --workdir=runs/sweep --table"
    " --metric=evaluation/success",
    of=("launch.report.comparison:refuse_metric",),
  ),
  Cause(
    code="TM-D13",
    title="The directory of a run was replaced while it ran",
    sees="runs/first leads to another directory now: that of this run was moved"
    " or removed; to go on, name it where it is now",
    why="A run writes to the path that --workdir names. Its directory is no"
    " longer there, but another one is, which may be that of another run. So it"
    " ends, and writes nothing more.",
    cure="Name the directory where it is now, with --workdir. Stop a run before"
    " its directory is moved.",
    code_block="twinmesh train --config=moved/first/config.json"
    " --workdir=moved/first",
    of=("launch.cli.workdir:Moved",),
  ),
  Cause(
    code="TM-R01",
    title="The run waited too long",
    sees="the learner waited 600.0 s for a group (deadline 600.0 s); waiting"
    " now:\n  ..",
    why="Every wait has a deadline: progress_timeout_s for the run, others for"
    " steps and rewards. The table shows who waits for what, longest first; the"
    " stack of each busy thread follows.",
    cure="Look at the last line of the table: often an environment that never"
    " answers, or a first compilation that is slower than the deadline. Then"
    " raise the deadline that is named; the same command goes on.",
    code_block="twinmesh status runs/first",
    of=("rl.runtime.virtual_clock:Deadlock", "rl.runtime.watchdog:Stalled"),
  ),
  Cause(
    code="TM-R02",
    title="All engines are lost",
    sees="all 2 engines have stopped, engine 1 because decoding raised"
    " XlaRuntimeError('RESOURCE_EXHAUSTED: ..')",
    why="An engine that stops is started again, a few times"
    " (Recovery). This run has lost its last one for good; the"
    " message has its last words.",
    cure="For memory, lower engine.slots, or rollout.max_tokens in a new run."
    " For engines in processes read their logs in the run's directory. The same"
    " command goes on from the newest checkpoint.",
    of=("rl.engine.contract:EngineClosed", "rl.remote.connection:Lost"),
    replies=("engine_closed",),
  ),
  Cause(
    code="TM-R03",
    title="The learner is lost",
    sees="process 1 of the learner was lost between two commands: learner 1"
    " ended with code -9; its log, runs/first/learner_1.log, ends:\n  ..",
    why="The processes of a learner work in step, and one of them has ended:"
    " killed, out of memory, or cut off.",
    cure="Read its log, in the run's directory, and repeat the command: it goes"
    " on from the newest checkpoint.",
    of=("rl.remote.connection:Failed", "rl.train.learner:LearnerLost"),
  ),
  Cause(
    code="TM-R04",
    title="Faults left nothing to train",
    sees="rounds in a row that trained nothing because of faults: 4, and"
    " max_skipped=3 allows no more; most episodes ended with env: ..",
    why="An episode whose environment or reward fails has no reward, and is"
    " masked. When all episodes of some rounds end so, or all demonstrations of"
    " a step of the warm start, no further one would be better.",
    cure="Correct the environment or the reward; the fault that is named is the"
    " most frequent one. The same command then goes on.",
    code_block="twinmesh try --config=FILE",
    of=(
      "launch.run.round_warnings:Hopeless",
      "rl.loop.warm_start:NoDemonstration",
    ),
  ),
  Cause(
    code="TM-R05",
    title="A metric left its bound",
    sees="round 7: logprob_gap_mean is 0.31, above 0.05, for 2 rounds."
    " docs/metrics.md tells what it means; bounds.logprob_gap sets the limit,"
    " and what follows",
    why="A metric that drifts so far says that what is trained can no longer be"
    " trusted: a gap between engine and learner, for instance, means that they"
    " compute different things. The round is saved.",
    cure="[Metrics](metrics.md) says what the metric means and what moves it."
    " If the value is right for this run, raise bounds.NAME.limit, or set"
    " bounds.NAME.then=warn, and repeat the command.",
    of=("launch.run.round_warnings:OutOfBounds",),
  ),
  Cause(
    code="TM-R06",
    title="Loss or gradient are no longer finite",
    sees="round 12: updates in a row whose loss or gradient is not finite: 4,"
    " and max_skipped=3 allows no more; ..",
    why="An update that is not finite is skipped, with its batches kept in"
    " skipped/. Several in a row say that the weights themselves, or all data,"
    " lead to it.",
    cure="Replay the last one: it names the micro-batch, the trajectory and the"
    " parameters that are not finite. A lower optimizer.learning_rate or"
    " optimizer.max_grad_norm in a new run often is the cure.",
    code_block="twinmesh replay runs/first/skipped/round_000012_update_0",
    of=("builtins:FloatingPointError",),
  ),
  Cause(
    code="TM-R07",
    title="A call blocks the event loop",
    sees="the event loop was blocked for longer than progress_timeout_s=600;"
    " the call that blocks it is above; to go on:\n  ..",
    why="One event loop does all bookkeeping. A call in it that does not"
    " return, most often in an async method of an environment or reward,"
    " stops all else.",
    cure="Run such calls in a thread, by envs.threads, or await them; a method"
    " that is not async is run in a thread by itself.",
  ),
  Cause(
    code="TM-R08",
    title="A tracker cannot be used",
    sees="MLflow cannot be used: ..; set --config.tracker.uri",
    why="The service that metrics are sent to did not take this run at its"
    " start: no login, or no connection. Later failures only warn.",
    cure="Log in, correct the address, or send later: Weights & Biases has an"
    " offline mode. metrics.jsonl has all metrics in any case.",
    code_block="twinmesh train .. --config.tracker=none",
    of=("rl.loop.trackers:TrackerFailed",),
  ),
  Cause(
    code="TM-R09",
    title="The log of a run breaks a rule",
    sees="group 50: neither trained nor dropped by version 4, though under way"
    " since version 1",
    why="At its end a run checks its own event log: every token in one column"
    " of the ledger, versions that only rise, staleness within the bound. A"
    " line says what did not hold, and where.",
    cure="This is a bug of Twinmesh, or a log that was edited. Keep the"
    " directory, and report the lines with the config; do not trust the"
    " figures of the run. Where the line says that the log has nothing of some"
    " rounds, it was lost as the directory was moved: events.jsonl and events/"
    " belong to the checkpoints.",
    code_block="twinmesh report --check=runs/first",
  ),
  Cause(
    code="TM-H01",
    title="The address or port of a server cannot be used",
    sees="--host=127.0.0.1 --port=8000 cannot be used: Address already in use;"
    " use --port=0 for any free port",
    why="Another program listens there, often an earlier server of the same"
    " command; ports below 1024 need rights; or the host is none of this"
    " machine.",
    cure="Take another port, or 0 for any free one, which is then printed.",
    code_block="ss -ltnp 'sport = :8000'",
    of=("launch.http.http_server:bind_flags",),
  ),
  Cause(
    code="TM-H02",
    title="Keys of a server are missing, or too weak",
    sees="--host=0.0.0.0 is reached from other machines, and anyone there would"
    " be answered; give --api_key_file=FILE, or use --host=127.0.0.1",
    why="A server beyond this machine answers only requests with a key. Keys"
    " are lines of a file, of 16 or more characters.",
    cure="Make a key, and give it to clients as api_key.",
    code_block="python -c 'import secrets; print(secrets.token_urlsafe())'"
    " > keys",
    of=("launch.http.access",),
  ),
  Cause(
    code="TM-H03",
    title="A certificate cannot be used",
    sees="give both of --tls_certificate and --tls_key, or none of them",
    why="The certificate, with its chain, and its key are PEM files that belong"
    " together; the key has no password, as nobody could type it.",
    cure="Check that both fit; for a trial make a pair that signs itself.",
    code_block="openssl req -x509 -newkey rsa:2048 -nodes -days 30 \\\n"
    "  -subj /CN=localhost -keyout key.pem -out cert.pem",
    of=("launch.http.http_server:read_tls",),
  ),
  Cause(
    code="TM-H04",
    title="A server refuses a request",
    sees='{"error": {"message": "max_tokens=0 must be at least 1", "type":'
    ' "invalid_request_error", "param": "max_tokens", "code": "bad_request"}}',
    why="The body is no JSON, a field is missing, unknown, of another type or"
    " out of its bounds, the key is wrong (401, invalid_api_key), or the"
    " request comes by a name or from a page that the server does not answer"
    " (403, 421).",
    cure="`param` names the field. Where the context is too long, send less or"
    " ask for fewer tokens. For 401 send Authorization: Bearer KEY; for"
    " 421 start the server with --allow_host=NAME.",
    of=(
      "launch.http.json_fields:BadRequest",
      "models.chat.answer_grammar",
      "models.chat.call_formats",
    ),
    replies=("bad_request", "context_length_exceeded", "invalid_api_key"),
  ),
  Cause(
    code="TM-H05",
    title="A server has no room for a request now",
    sees='{"error": {"message": "256 answers to this client are in progress,'
    ' and 256 is the most: 1 more must wait", "type": "rate_limit_error",'
    ' "code": "too_many_requests"}}',
    why="Answers in progress, and open sessions, are bounded, in all and for"
    " each key; and a server that ends takes no more requests (draining).",
    cure="Wait as long as retry-after says and repeat; the clients of OpenAI do"
    " so. More at a time: --max_answers, --max_client_answers,"
    " --max_sessions.",
    of=(
      "launch.http.admission:Busy",
      "launch.http.admission:Draining",
      "rl.agents.sessions:TooManySessions",
    ),
    replies=("too_many_requests", "too_many_sessions", "draining"),
  ),
  Cause(
    code="TM-H06",
    title="A session takes no more requests",
    sees='{"error": {"message": "session a is finished; use another name",'
    ' "code": "finished_session"}}',
    why="A session is one episode: it begins with its first request, is trained"
    " or recorded when it is finished, and may hold only so much. One without"
    " a request for --session_idle_s is ended.",
    cure="Use a new name for each episode, and finish sessions that are done.",
    of=(
      "rl.agents.sessions:FinishedSession",
      "rl.agents.sessions:FullSession",
      "rl.agents.sessions:UnknownSession",
    ),
    replies=("unknown_session", "finished_session", "full_session"),
  ),
  Cause(
    code="TM-H07",
    title="A server could not answer, or not keep, a request",
    sees='{"error": {"message": "the server failed", "type": "server_error",'
    ' "code": "internal_error"}}',
    why="The answer took longer than --answer_s (timeout), the disk of --record"
    " is full (unrecorded), or something failed that should not"
    " (internal_error): then the server's stderr has the traceback.",
    cure="Ask for fewer tokens or raise --answer_s; make room on the disk;"
    " report the traceback.",
    of=("launch.gateway.session_record:Unrecorded",),
    replies=("timeout", "unrecorded", "internal_error"),
  ),
  Cause(
    code="TM-X01",
    title="A package is missing",
    sees="this needs the package uvicorn: pip install 'twinmesh[serve]'",
    why="The core has no packages for games, servers, trackers and published"
    " tokenizers: each part has an extra that brings them.",
    cure="Install the extra that is named, into the environment of this Python."
    " In a clone, `make setup` installs all that the tests need. A module of"
    " your own has to lie beside the config that imports it.",
    code_block="pip install 'twinmesh[serve]'",
    of=(
      "builtins:ModuleNotFoundError",
      "envs.extras",
      "envs.suites.bfcl:_package",
      "rl.settings.checks:_missing_from",
      "rl.settings.checks:installed",
    ),
  ),
  Cause(
    code="TM-X02",
    title="Another package has the name of one of ours",
    sees="the package models is work/models, where Twinmesh needs that of"
    " site-packages; rename the other one, or start elsewhere, as the current"
    " directory and PYTHONPATH come first. ..",
    why="rl, models, envs, launch and configs are common names, and Python"
    " takes the first that it finds: here, PYTHONPATH, then what is installed.",
    cure="Start the command in a directory without such folders, or install"
    " Twinmesh into an environment of its own.",
    code_block="python -c 'import models; print(models.__file__)'",
    of=("twinmesh.top_packages:Shadowed",),
  ),
  Cause(
    code="TM-X03",
    title="Something failed that should not",
    sees="RuntimeError: group 3 is not in flight",
    why="An exception that no check foresaw, in Twinmesh or in code of yours"
    " that it calls. The traceback above names the line; if the last lines lie"
    " in your files, begin there.",
    cure="Repeat the command: a run goes on from its newest checkpoint. If it"
    " fails again, report the traceback and the versions.",
    code_block="twinmesh --version",
    of=(
      "launch.http.json_fields",
      "launch.report.trajectory_index",
      "rl.backends.host:read_program",
      "rl.data",
      "rl.engine.builtin",
      "rl.engine.contract",
      "rl.pools.router",
      "rl.pools.routing_table",
      "rl.remote",
      "rl.runtime.checksum",
      "rl.testing",
    ),
    replies=(),
  ),
)
"""All causes, by theme."""

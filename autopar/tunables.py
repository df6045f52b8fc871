"""The numbers by which the search is tuned, in one place: what each does, and what happens when it is changed.

None of them decides whether a plan is right or fits: only how long is looked, and where first. Seconds and shares of
the budget are of counted work (`autopar.clock`), and bind on large models alone; most searches end before.
"""

from fractions import Fraction

# work: what searches do is counted, in seconds that it takes on an idle core ----------------------------------------

GUARD = 60.0
"""By the wall clock, a search may take so many times its budget; then it ends with what it has, and says so. Halved, it
strikes on machines that are busier by half, and plans depend on the machine there; doubled, whoever has to wait does so
for longer."""
TABLE_S, NODE_S, MESSAGE_PASSES = 1e-7, 2e-9, 10
"""A solver reads an entry of a cost table, in so many passes where it sends messages first; and looks at it in a node
of its tree. All counts of work: halved, twice as much is done for the same budget, and it takes twice as long."""
ROW_NODE_S = 2e-7
"""The same of an entry of a memory row."""
SOLVE_S, REDUCE_S = 8e-3, 2e-8
"""A problem is solved, however small it is; an entry of it is reduced."""
BUILD_S, BUILD_NODE_S, BUILD_ENTRY_S = 2.5e-2, 5e-5, 1e-7
"""A problem is built of a graph: in all, a node of it, an entry of its tables."""
LOWER_NODE_S, FINISH_ITEM_S, PLAY_ITEM_S = 2.5e-5, 1e-5, 5e-6
"""A segment that was not known is lowered, a node; it is made ready to be played, an item; it is played in one
direction from a state in which it was not, an item."""
PLAY_S, JOIN_PART_S, TAKE_PART_S, TURN_S = 1e-3, 2e-5, 4e-6, 1e-5
"""A plan is simulated, whatever is known of it: in all, a part of a stage, a part of a pass, and a pass."""
PROPOSAL_S, PROPOSAL_NODE_S, CUT_NODE_S = 1e-4, 5e-7, 2.5e-6
"""A proposal is drawn, and its bound found: in all, and a node of the graph; a node of a plan that is cut into stages
again."""
KIND_S, PEAK_S = 8e-3, 2e-7
"""What each layer costs in one way is looked up, beside its simulation; a change of memory is put in order, where a
peak is asked for."""
RANGES_S = 1e-6
"""A kind of stage, for two borders between layers and a bottleneck, in a dynamic programme."""
TRY_S = 1e-3
"""A substitution is tried."""
REMOVE_S, SWEEP_S, MESSAGE_S = 5e-5, 1e-8, 1e-7
"""A variable is eliminated, beside the sums of its tables; an entry of what that leaves is swept over, or sent messages
through, there and back."""
PART_S = 3e-4
"""A part of a problem is cut out, to be solved again."""

# stage: equal stages, by estimates on a short graph ----------------------------------------

STAGE_SHARE = 0.5
"""Of the budget for looking at settings; the rest is for simulating the best. Halved, large meshes see fewer settings;
doubled, nothing is left for finalists, of which then one is simulated."""
FIRST_LOOK_SHARE = 0.5
"""Of that for a first look at each logical shape; what comes after it is judged by the best of these. Halved, more
shapes are judged without a look; doubled, no time is left to climb."""
SOLVE_SHARE = 0.1
"""Of the budget what one solve may take: there are many, and each needs to be near enough only. Halved, hard problems
end further from their bound; doubled, a few of them may take all the time."""
LIKELY_STAGES = 8
"""The number of stages that is looked at first: what comes later is judged by what was found. Other values change the
order alone, and by that what is left when time ends."""
FULL_MICROBATCHES = 4
"""With so many microbatches for each other stage, the bubble is a fifth: where the search for their number begins.
Halved or doubled, it begins a step below or above, and climbs as far."""
MOST_CHUNKS = 16
"""Stages a submesh in turn, up to which those that make rounds shorter are looked at: an estimate each, no solve. More
make the bubble smaller, and messages and what is simulated more."""
EXCHANGE_GAIN = 0.01
"""Of what a layer of experts takes, by which another way to exchange its tokens must be cheaper to be a row of its
table. Doubled, tables have fewer rows; at 0, they change between ways that a profile cannot tell apart."""
REPLICA_GAIN = 0.1
"""Of the rows of the busiest rank, how many one more replica of an expert must take away to be looked at in templates.
Halved, more experts are replicated where they are split as a node's ranks share them; the number is priced again later.
"""
LAYER_STEPS = 20
"""Of the mean of layers, by which they are told apart where they are shared out to chunks. More finds borders for ways
that differ by less; half as many may share out a layer more to the stage that is the busiest."""
HULL_HALVINGS = 3
"""Of the hull of time against memory, towards the fastest placements that fit. Halved, plans near the limit of memory
are up to a quarter of the hull from the best there; doubled, twice as many ways are played."""
BESIDE_KNOWN = 1.05
"""Stages that would take so many times a plan that is known, a template, are not looked at further, nor simulated. At
1.03, what estimates cannot tell apart is left out; at 1.1, a third more is solved and simulated on many devices."""
HOPELESS = 1.03
"""A setting whose fastest placements would take so many times the best estimate is not looked at further. At 1, what
estimates cannot tell apart is left out; at 1.06, more settings are traded against memory for nothing."""
MEMORY_BOUND = 1.01
"""What fits of a setting is bound by memory where it takes so many times what the fastest would: then what takes less
is looked for. At 1.05, stages that are cut to fit, and wait, keep faster ones from being found; at 1, more is played.
"""
RELIEF, RELIEF_ROOM = 0.03, 1.05
"""Of what a setting takes, what it is likely to take more where it needs twice the memory that there is, and placements
must save that; four times as much where it is four times of it, and so on.
Up to so many times the memory there is, what computes less again may fit: placements save that little for nothing.
Halved, settings of few microbatches are traded against memory, that must compute much again; doubled, those of many, of
which each is less efficient, end the climb too early."""
LIKE_SHAPES = 0.98
"""Of what one number of microbatches takes in another shape of as many devices, next to a second number, what it may
take in a shape. At 1, differences between shapes that memory makes are missed; at 0.9, each shape is looked at in
numbers that are slower in all.
"""
HOPED = 0.95
"""A logical shape is looked at in other numbers of microbatches, and its best traded against memory, where so much of
what it is likely to take is less than the best. At 1, what relieves memory cheaply is missed; at 0.9, most are."""
LESS_EACH = 0.97
"""More samples a microbatch are looked at while templates are too slow, but take no more than so many times as long for
each. At 1, what no number of samples makes faster is solved again and again; at 0.9, what launches bind is missed."""
MOST_SAMPLES = 4
"""Of a microbatch on a rank, up to which templates of several stages are estimated. Doubled, small models are looked at
in larger microbatches, a problem for each; halved, what larger products gain is missed."""
MOST_SAMPLES_ALONE = 32
"""The same where one stage is among them, on ladders: small models on few devices run in few large microbatches.
Halved, these are missed; doubled, a problem more is solved where each larger microbatch gains something."""
NEAR_ESTIMATE, TEMPLATES_LOOKED_AT = 1.04, 6
"""Templates of several stages are looked at, at most so many, while the next is estimated to take no more than so many
times the best of them. Halved, the best may be missed where estimates are alike; doubled, twice as many problems."""
SHARED_SIZES = 3
"""Numbers of ranks that share the experts of a template of several stages, from those of a node on. Halved, models
whose experts fit on the ranks of several nodes alone have no such template; doubled, problems are solved that send more
for nothing."""
FAR_TEMPLATE = 1.15
"""Logical shapes whose best template would take so many times the best of all are not looked at otherwise. Nearer to 1,
placements that no template has are missed where these gain much; doubled, most shapes are looked at for nothing."""
TEMPLATE_SHAPES = 8
"""Logical shapes, the best first, for which placements are also found around templates: at most five solves each.
Halved, what hides more than it costs may be missed; doubled, that takes twice as long."""
NEAR_TEMPLATE = 1.25
"""A template that would take so many times the best estimate is not looked at with more or fewer microbatches. At 1.1,
steps on shared cores, which depend little on their number, end before the best; at 1.5, more solves."""
BETWEEN = 2
"""Settings, the best first, from which numbers of microbatches are looked at that are between those of before, where
the batch divides by others than powers of two. Doubled, twice as many solves, where most are no better."""
RUNNERS_UP = 2
"""Other borders between stages that are kept of each setting, for when it is the best when simulated. Each is one more
plan to simulate, of the best settings alone."""
PEAK_SLACK = 1.0
"""Estimated peaks are within a few hundredths, too high or too low. At 1.03, what is estimated to be the fastest is
often simulated not to fit, and is all that is kept of its setting; at 0.97, plans that fit are left out."""
CORE_STEPS = 100
"""Of the slowest stage's time, by which stages are told apart where they share cores. More makes the estimate of shared
cores finer and its table longer."""
MOST_LAYERS = 32
"""Of a model without repeated blocks, which is cut into as many. Doubled, borders are finer, and the dynamic programme
takes four times as long; halved, stages are less even."""

# stage: stages that differ ----------------------------------------

MIXED_SHARE = 0.7
"""Of the budget, until when to look at more of them."""
MIXED_COUNTS = 2
"""Numbers of microbatches that are looked at, the best first: a dynamic programme or two for each."""
MIXED_SIZES = 4
"""Submeshes of sizes within this factor of the best's are mixed: others are far off, and each size has its tables."""
EVEN = 0.95
"""Of the slowest stage's time, what stages of one size take in the mean where other sizes could gain little. Nearer to
1, two more problems are solved for little; at 0.8, a layer in five may be waited for."""
MIXED_ROUNDS = 8
"""Bottlenecks that one dynamic programme is run for. Halved, its bound is less tight."""
MOST_STAGES = 64
"""That differ. More is possible with equal stages alone."""
KEPT_MORE = 8
"""Candidates, the best first, of which fewer layers are computed again where that fits: sums, no solve."""

# stage: what is simulated ----------------------------------------

FINALISTS = 3
"""Plans that are built for the whole model and simulated; more where these do not fit, or simulating is quick. At 1,
the best by estimate is believed; doubled, deep models take twice as long to simulate."""
FAR_FINALISTS = 1.01
"""What would take so many times the fastest that was simulated, by an estimate that is corrected, is not simulated, but
where ranks share cores. At 1.005, what estimates cannot tell apart is left out; at 1.02, twice as many are simulated
that are no better."""
NEARLY_FINALISTS = 1.05
SPLIT_FINALISTS = 2
"""Where products gain beside what is sent, so many templates that split activations by positions are tried so, too, of
those that take at most so many times the best without. At 1.02, those of Llama-3-70B on 64 H100 that are then faster
are just among them; each that is tried takes what simulating a plan does."""
MOST_FINALISTS = 32
QUICK_S = 1.0
"""Seconds for which finalists are simulated beyond that, up to so many; doubled, small models are planned later."""
CORRECTIONS = 3
"""Times that the fastest plan computes fewer layers again, its estimated peak corrected by what was simulated."""
LIKE_BORDERS = 0.01
"""Of plans whose steps are within this share of the fastest's, other borders of stages are looked at."""

# place: one stage ----------------------------------------

MOST_EXPLAINED = 2
"""Axes on which a template's choices are held against all others: on three, these are thousands an operator."""
FEW_DEVICES = 8
"""Where stages are looked for, one stage is looked at again on so few devices, on logical meshes of three axes, too.
Doubled, nodes of 16 devices are as well: up to seven problems of the whole graph more."""
BOUND_SEQUENCE = 512
"""Where memory binds, the graph that says where sequences may be split is planned as well if they are so long. Halved,
small models that just fit are planned twice for nothing; doubled, some compute again what ranks could share."""
LONG_SEQUENCE = 16_384
"""Where attention has so many queries a sample, templates that split sequences are looked at: others have room enough
for samples and heads, and are planned as if there were none."""
TOLD_SEQUENCE = 1_024
"""Of so many queries a sample on, attention is told what its mask says wherever that spares scores or half of them,
whether sequences are split or not. Halved, short sequences run in several small kernels; doubled, scores that are
written out take most of the memory of some models.
"""
LEAST_PLACE_SHARE = 0.25
"""Of the budget what that search has at least, however long the one for stages took; beside a plan of stages it ends
then. Doubled, large models on few devices take up to a quarter of the budget longer, mostly for nothing."""
MOST_HIDDEN = 1.05
"""A plan's step is at most so many times shorter than its operators and what is between them, by what the simulator
finds hidden. Less leaves out logical meshes whose plans hide much; more solves and simulates meshes that do not win."""
ONE_STAGE_HALVINGS = 2
"""Of the hull of time against memory, all of whose points are played: three points, five, or nine. Halved, plans that
hide what they gather may be missed, and those near a limit be slower; one more, twice as many are played."""
COPIED_SHARE, COPIED_COUNTS = 0.25, 4
"""Of the budget what is spent, for each number of microbatches, on blocks that wait on the host, where that is allowed;
and of how many such numbers. Halved, slow links' plans in many microbatches are missed; doubled, planning takes longer
where memory is short."""
IN_BITS_SHARE, IN_BITS_COUNTS, MESHES_IN_BITS = 0.1, 2, 2
"""The same of operators that keep bits for their backward pass, where memory binds, on so many logical meshes: those of
the fastest plans. Halved, a plan on another mesh is missed, which bits alone make fit; doubled, such models plan for
half as long again."""
BESIDE_FASTEST, MOST_BESIDE = 1.1, 6
"""Plans of a place that take at most so many times the fastest are kept, at most so many: one of them may be the
fastest in branches; what must compute more again to fit is, as far as branches may spare that. Nearer to 1, less is
played; doubled, more is, that gains nothing."""
LEAST_SOLVE_S = 2.0
"""What a solve may take at least, however little time is left. Halved, large graphs may end without a plan."""
FIT_TRIES = 6
"""Limits that a problem is solved under until the simulated peak fits. Halved, tight limits are met later, in more
microbatches; doubled, refusals take longer."""
MAX_FAILURES = 6
"""Of asking a place for less memory, before the smallest limit so far is named. Halved, the limit that a refusal names
may be larger than need be; doubled, refusals take longer."""

# balance, kinds: unequal devices ----------------------------------------

BALANCE_SHARE = 0.5
"""Of the budget, for shares of the batch where stages of one kind of device are looked for, too."""
KINDS_SHARE = 0.65
"""Of the budget, until when stages of one kind each are looked for where plans are refined after that: whole models are
simulated there, which takes all of its time. At 1, planning takes that much longer; halved, fewer axes are seen."""
MORE_BUSY = 1.01
"""Rows that are likely to make the busiest kind of device so many times as busy as it is are not simulated. At 1, what
a line through two simulations misjudges is missed; at 1.1, twice as much is simulated."""
LESS_HELD = 0.93
"""A part of the peak that such a line says for rows: what fits with no more than that is simulated. At 1, rows that
fit are missed, as peaks go by steps; at 0.85, more is simulated that does not fit."""
LEAST_SEARCH_S = 1.0
"""What a search has at least, however long others took."""
UNEQUAL_CHUNKS = 2
"""Stages a submesh in turn, with schedules that have several. More make the bubble smaller and messages more."""
MOST_A_STAGE = 8
"""With so many microbatches for each stage the bubble is small: more are not looked at. Halved, slow stages wait more;
doubled, one more number of them is simulated."""

# template ----------------------------------------

FIRST_COUNT = 8
"""Where memory is tight, a template is known from at most so many microbatches. Halved, what small ones cost is judged
by that of larger ones; doubled, the other way about."""
TEMPLATE_TRIES = 3
"""Limits, and numbers of blocks that are computed again, that are tried until a template fits."""
NEAR_SHARDED = 1.1
"""A template with ZeRO-3 that takes so many times the best step is not looked at with less sharded. At 1.2, templates
that gather much are solved for nothing; at 1.05, one that wins without gathering may be missed."""
ALIKE = 1.03
"""Where a template is likely to take so many times the best step, it does so with the sequence split, too, and among
more ranks."""
INSTEAD_AGAIN = 1.25
"""Where a template that fits in several microbatches takes so many times its least, as each of them gathers, fewer are
looked at with blocks computed again. At 1.1, templates are played that compute more than they spare; at 1.5, what
gathers a third of its time stays as it is."""
MOST_AXES = 2
"""Of templates whose ranks share experts: a third makes a problem take ten times as long, 4 s for two layers."""
USAGE_ABOVE = 1.15
"""Placements may be estimated to need so many times what they do: not all that they need is needed at once. Less leaves
out templates that fit; more plays some that do not."""
USAGE_NEAR = 1.03
"""The same, where it is known by how much the peak of a like template was above the estimate."""
USAGE_BELOW = 0.9
"""What placements use by estimate is about this part of their peak: gradients of activations come on top."""
EXPOSED = 0.2
"""Of what ZeRO-3 gathers and reduces, a step waits for about this part. It orders what is tried, no more."""
LEAST_GAIN = 0.01
"""A part of the best step: what computing fewer blocks again would gain is tried where it is more."""

# rewrite: equal graphs ----------------------------------------

SUBSTITUTION_SHARE = 0.25
"""Of the budget, for each of the two searches for substitutions: on one device, and on a share of the batch."""
SUBSTITUTION_S = 4.0
"""What each may take where graphs are not planned everywhere. Mostly it ends long before, by counts."""
NEAR_SETTING = 1.1
"""Settings in which a plan takes so many times the best one's step are near enough for an equal graph to be better;
and a graph that is faster by as much is planned in all. At 1.2, more plans of few graphs; at 1.05, a graph that wants
another number of microbatches may be missed."""
MOST_SETTINGS = 3
"""In which an equal graph is planned."""
NEARBY_S = 6.0
"""Seconds, from the begin of the search for equal graphs, after which planning of no more of them begins; the fastest
on one device is planned in any case: where finding it took that long, leaving it out would leave all to chance. A plan
in one setting may take as long."""
ANYWHERE_SHARE = 0.5
"""Of the budget for planning an equal graph in all settings, where it is much faster than the model's own."""

# branch, refine ----------------------------------------

BRANCH_SHARE = 0.5
"""Of the budget, for operators beside each other."""
MOST_BRANCHED = 3
"""Plans that gain by branches, after which no more are tried. At 1, which plan is the fastest without decides what is
gained; doubled, small models take longer."""
LEAST_FORK_GAIN = 0.001
"""A part of the step: equal regions are simulated in branches where they may spare more. Halved, more are, which no
profile could tell from the plan; a hundred times as much, and heavy branches of few blocks are missed."""
SEVERAL_STARTS = 5_000
"""With so many proposals, refinement begins at expert plans and at a drawn one, too; with fewer, chains would be too
short to get from there to anything better than the plan."""
SHORT_SHARE = 0.5
"""Of the time for refinement, what chains on a short model may take; in the rest the whole one is simulated."""
KEPT = 8
"""Blocks of that short model. The last has no other after it, the first few none before: those between are alike.
Halved, ends weigh more in what a change seems to gain; doubled, proposals cost twice as much."""
WALKED = 200
"""Proposals that a random start is away. Halved, it is nearer the plan; doubled, a little time more."""

# recomputation by operator ----------------------------------------

CHEAP_MOVES, CHEAP_FLOPS = 8, 32
"""`recompute="selective"` computes an operator again that moves at most so many bytes for each that need not be kept
then, and computes at most so much for each element that it makes. Moves halved, rotated positions and chains of
products stay; doubled, more of such chains is made again, for less memory each. FLOPs halved or doubled change nothing:
norms and activations are far below, matrix products and attention far above but in the smallest of models."""
LEVEL_PRICES = {"selective": Fraction(1, 4), "extensive": Fraction(2)}
"""What the search computes again of layers, between nothing and all: operators that cost at most so many times what a
byte does on average where all of a block is computed again. Between them layers are mixed, so that two are enough: of
transformers, norms and activations cost a tenth of the average and less, products about as much as it, attention of
long sequences a few times as much. Halved, products are kept but in the extensive one; doubled, attention is not."""

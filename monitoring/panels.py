"""What the dashboard shows, row by row: each panel with its expressions and what to do when it looks bad."""

from __future__ import annotations

from monitoring.panel_kit import Panel, Query, Row, heatmap, in_time, mean, quantiles, share, sum_rate

_USERS = Row(
    "Are users well served?",
    (
        Panel(
            "Ready",
            "Instances that take requests, of those chosen. Red: ask /ready why, and see the runbook: OctavoNotReady.",
            (Query("sum(octavo_ready{I}) / count(octavo_ready{I})"),),
            "percentunit",
            "stat",
            3,
            steps=(("red", None), ("orange", 0.01), ("green", 1.0)),
        ),
        Panel(
            "First token within 2 s",
            "Objective: 99 %. Below it, compare Queue, Prefill and Tokenise in the row Engine: too much work, "
            "or long prompts?",
            in_time("octavo_time_to_first_token_seconds", "2.0"),
            "percentunit",
            "stat",
            4,
            steps=share(0.99),
        ),
        Panel(
            "Token gap within 200 ms",
            "Objective: 99 %. Below it streams stutter: Step time says which part of a step grew.",
            in_time("octavo_inter_token_seconds", "0.2"),
            "percentunit",
            "stat",
            4,
            steps=share(0.99),
        ),
        Panel(
            "Answers without an error",
            "Objective: 99.9 %. Below it, look at the row Errors, then for finish_reason=error in the log.",
            (
                Query(
                    "1 - "
                    + sum_rate('octavo_requests_finished_total{I,reason="error"}')
                    + " / "
                    + sum_rate("octavo_requests_finished_total{I}")
                ),
            ),
            "percentunit",
            "stat",
            4,
            steps=share(0.999),
        ),
        Panel(
            "Output tokens a second",
            "Tokens that clients have got. A fall with a steady queue means that steps have become slower.",
            (Query(sum_rate("octavo_generation_tokens_total{I}")),),
            kind="stat",
            width=3,
        ),
        Panel(
            "Requests a second",
            "All answered HTTP requests but probes and scrapes. A sudden zero: see the runbook, OctavoNoTraffic.",
            (Query(sum_rate('octavo_http_requests_total{I,route!~"/metrics|/health|/ready"}')),),
            kind="stat",
            width=3,
        ),
        Panel(
            "Waiting",
            "Sequences in the queue now. Above 20 for minutes: add an instance.",
            (Query("sum(octavo_requests_waiting{I})"),),
            kind="stat",
            width=3,
            steps=(("green", None), ("orange", 10), ("red", 20)),
        ),
        Panel(
            "Time to first token",
            "From a request's arrival to its first token. p99 far above p50: some wait in the queue or bring "
            "long prompts.",
            quantiles("octavo_time_to_first_token_seconds"),
            "s",
        ),
        Panel(
            "Token gap",
            "Between one token of an answer and the next. If it grows with Prefill tokens, lower "
            "--max-num-batched-tokens.",
            quantiles("octavo_inter_token_seconds"),
            "s",
        ),
        Panel(
            "Whole answer",
            "From a request's arrival to its last token. Compare Answer length: long answers are no fault.",
            quantiles("octavo_request_duration_seconds"),
            "s",
        ),
        heatmap(
            "Time to first token, spread",
            "octavo_time_to_first_token_seconds",
            "s",
            "Two bands mean two kinds of requests, such as cached and uncached prompts. A band that climbs is a queue.",
        ),
        heatmap(
            "Token gap, spread",
            "octavo_inter_token_seconds",
            "s",
            "A second, slower band are steps that carry prompt chunks, or pauses by preemption: see Step time.",
        ),
        heatmap(
            "Whole answer, spread",
            "octavo_request_duration_seconds",
            "s",
            "Where most answers lie. A new band at the top are requests that wait or that were preempted.",
        ),
    ),
)
_ENGINE = Row(
    "Engine",
    (
        Panel(
            "Sequences",
            "Running beside waiting. Waiting while running is below its limit: KV memory is short, see the row Memory.",
            (
                Query("sum(octavo_requests_running{I})", "running"),
                Query("sum(octavo_requests_waiting{I})", "waiting"),
                Query("sum(octavo_requests_swapped{I})", "of them swapped out"),
                Query("sum(octavo_max_step_sequences{I})", "limit"),
            ),
        ),
        Panel(
            "Tokens through the model",
            "Prompt tokens and answer tokens a second. Prefill without decode: prompts crowd out answers.",
            (Query(sum_rate("octavo_computed_tokens_total{I}", "kind"), "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "Step time",
            "Mean time of each part of a step. forward should dwarf the others; gap is time in which there was "
            "work and none was done: the CPU is busy elsewhere. prepare is inputs, and KV copied or swapped.",
            (
                Query(
                    f"{sum_rate('octavo_step_phase_seconds_sum{I}', 'phase')}"
                    f" / {sum_rate('octavo_step_phase_seconds_count{I}', 'phase')}",
                    "{{phase}}",
                ),
            ),
            "s",
            stacked=True,
        ),
        Panel(
            "Forward pass by kernel",
            "Shares of the model's time, from one step in 64. Attention grows with the context, linear and gated_mlp "
            "with the tokens in a step; another kernel that takes a tenth or more is worth a profile.",
            (
                Query(
                    f"{sum_rate('octavo_sampled_kernel_seconds_total{I}', 'kernel')}"
                    f" / scalar({sum_rate('octavo_sampled_kernel_seconds_total{I}')})",
                    "{{kernel}}",
                ),
            ),
            "percentunit",
            stacked=True,
        ),
        Panel(
            "Sequences in a step",
            "Mean batch. Near the limit the engine is full; small batches beside a queue mean that KV memory is short.",
            (
                Query(mean("octavo_step_sequences"), "mean"),
                Query("max(octavo_max_step_sequences{I})", "limit"),
            ),
        ),
        heatmap(
            "Tokens in a step",
            "octavo_step_tokens",
            "short",
            "A band at the budget are steps full of prompt chunks; a band at the number of streams are pure decodes.",
        ),
        Panel(
            "A request's time",
            "Mean of its stages. The one that grew is the one to act on: queue (add an instance), prefill (long "
            "prompts, few "
            "cache hits), decode (long answers or slow steps), tokenise (huge prompts).",
            (
                Query(mean("octavo_request_tokenize_seconds"), "tokenise"),
                Query(mean("octavo_request_queue_seconds"), "queue"),
                Query(mean("octavo_request_prefill_seconds"), "prefill"),
                Query(mean("octavo_request_decode_seconds"), "decode"),
            ),
            "s",
            stacked=True,
        ),
        Panel(
            "Steps a second",
            "No steps while sequences run: the engine is stuck; the watchdog replaces it after 120 s.",
            (Query(sum_rate("octavo_engine_steps_total{I}"), "steps"),),
        ),
        Panel(
            "Experts",
            "Tokens that each expert of a mixture takes. A few that take nearly all slow steps down.",
            (Query(sum_rate("octavo_expert_tokens_total{I}", "expert"), "{{expert}}"),),
            needs="a mixture of experts",
        ),
        heatmap(
            "Prompt length",
            "octavo_request_prompt_tokens",
            "short",
            "In tokens. Longer prompts make first tokens later and need more KV memory.",
        ),
        heatmap(
            "Answer length",
            "octavo_request_generation_tokens",
            "short",
            "In tokens. Longer answers keep their places in the batch longer: the queue grows.",
        ),
    ),
)
_MEMORY = Row(
    "Memory and cache",
    (
        Panel(
            "KV blocks",
            "By state; the height is the total. private and shared belong to live requests; cached can be "
            "reclaimed; when "
            "free and cached are gone, sequences wait or are preempted.",
            (Query("sum by (state) (octavo_kv_blocks{I})", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "KV use",
            "Share of the blocks that live requests hold. Above 95 % beside a queue: raise --kv-cache-memory.",
            (Query("max by (instance) (octavo_kv_usage_ratio{I})", "{{instance}}"),),
            "percentunit",
        ),
        Panel(
            "Wasted slots",
            "Slots of live blocks that hold no token: half a block a sequence is normal. Far more: lower --block-size.",
            (Query("sum(octavo_kv_wasted_slots{I})", "slots"),),
        ),
        Panel(
            "Preemptions",
            "Sequences that gave up their KV, by what became of it. More than a few a minute: memory is too "
            "small for "
            "--max-num-seqs; work is done twice and streams pause.",
            (
                Query(sum_rate("octavo_preemptions_total{I}", "kind"), "{{kind}}"),
                Query(sum_rate("octavo_preempted_tokens_total{I}"), "tokens lost"),
            ),
        ),
        Panel(
            "Host's KV pool",
            "Blocks by state, where --host-kv-memory gives some. cached are prefixes that had to leave: full of them "
            "is right. private and shared are preempted sequences; if they take most of it, more memory helps.",
            (Query("sum by (state) (octavo_host_kv_blocks{I})", "{{state}}"),),
            stacked=True,
            needs="a host pool",
        ),
        Panel(
            "Swapped blocks",
            "Blocks copied to the host's pool and back, a second. Much of both: sequences take turns in a KV cache "
            "that is too small for them.",
            (Query(sum_rate("octavo_swapped_blocks_total{I}", "direction"), "{{direction}}"),),
        ),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens that were in the cache. A fall after a change of the clients: something at "
            "the begin of "
            "the prompts now differs from request to request.",
            (
                Query(
                    f"{sum_rate('octavo_prefix_hit_tokens_total{I}')}"
                    f" / {sum_rate('octavo_prefix_query_tokens_total{I}')}",
                    "hit rate",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Evictions",
            "Cached blocks reclaimed a second. Many beside a low hit rate: the prefixes in use do not fit into memory.",
            (Query(sum_rate("octavo_evicted_blocks_total{I}"), "blocks"),),
        ),
    ),
)
_QUEUE = Row(
    "Queue and refusals",
    (
        Panel(
            "Age of the oldest",
            "How long the oldest request has waited. Above 30 s: see the runbook, OctavoQueueOld.",
            (Query("max by (instance) (octavo_oldest_waiting_seconds{I})", "{{instance}}"),),
            "s",
        ),
        Panel(
            "Time in the queue",
            "Until a step first runs some of the request. It is the part of the time to first token that "
            "capacity cures.",
            quantiles("octavo_request_queue_seconds"),
            "s",
        ),
        Panel(
            "Refusals",
            "By reason. queue_full: add an instance; *_per_minute and concurrency: limits of single keys; invalid, "
            "context_length, unknown_model: clients in error; not_ready, engine_unavailable: see OctavoNotReady.",
            (Query(sum_rate("octavo_refusals_total{I}", "reason"), "{{reason}}"),),
        ),
    ),
)
_ERRORS = Row(
    "Errors",
    (
        Panel(
            "Responses by status",
            "500: a fault of ours, the log has the stack; 503: no engine, or draining; 504: a deadline; 4xx: "
            "the client's; 499: "
            "it went before its answer.",
            (Query(sum_rate('octavo_http_requests_total{I,route!~"/metrics|/health|/ready"}', "code"), "{{code}}"),),
        ),
        Panel(
            "How answers end",
            "stop and length are natural. error: see the log. abort and timeout: see the next panel.",
            (Query(sum_rate("octavo_requests_finished_total{I}", "reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Aborts by cause",
            "disconnect: clients give up, often because answers come late; deadline: their timeouts or ours; "
            "shutdown: the "
            "drain time was too short.",
            (Query(sum_rate("octavo_aborts_total{I}", "cause"), "{{cause}}"),),
        ),
        Panel(
            "Engine restarts",
            "Since the server started, with choices carried over and lost. Any: find the reason in the log.",
            (
                Query("sum(octavo_engine_restarts_total{I})", "restarts"),
                Query("sum(octavo_replayed_choices_total{I})", "choices carried over"),
                Query("sum(octavo_failed_choices_total{I})", "choices lost"),
            ),
        ),
        Panel(
            "Tokens for nobody",
            "Computed and not delivered: behind a stop string, or after the client went. A large share of all "
            "output tokens: "
            "clients abort much.",
            (
                Query(sum_rate("octavo_discarded_tokens_total{I}"), "behind a stop string"),
                Query(sum_rate("octavo_overrun_tokens_total{I}"), "after the end"),
            ),
        ),
        Panel(
            "Slow requests",
            "Longer than --slow-request-seconds. The log marks them with slow=true.",
            (Query("sum(increase(octavo_slow_requests_total{I}[5m]))", "in five minutes"),),
        ),
    ),
)
_MACHINE = Row(
    "Machine",
    (
        Panel(
            "CPU",
            "Cores used. The server at one core: it is the limit, see Event-loop lag. The engine should use all "
            "its threads.",
            (
                Query("sum by (instance) (rate(process_cpu_seconds_total{I}[R]))", "server {{instance}}"),
                Query("sum by (instance) (rate(octavo_engine_process_cpu_seconds_total{I}[R]))", "engine {{instance}}"),
            ),
        ),
        Panel(
            "Memory",
            "Resident memory of both processes. Steady growth for hours is a leak: restart, and report it.",
            (
                Query("sum by (instance) (process_resident_memory_bytes{I})", "server {{instance}}"),
                Query("sum by (instance) (octavo_engine_process_resident_memory_bytes{I})", "engine {{instance}}"),
                Query("sum(octavo_weight_bytes{I})", "of it: weights"),
                Query("sum(octavo_kv_cache_bytes{I})", "of it: KV"),
                Query("sum(octavo_host_kv_cache_bytes{I})", "of it: KV that had to leave"),
            ),
            "bytes",
        ),
        Panel(
            "Event-loop lag",
            "How late the server's event loop is. p99 above 250 ms: streams stutter although the engine is on time.",
            quantiles("octavo_event_loop_lag_seconds"),
            "s",
        ),
        Panel(
            "File descriptors",
            "Open ones of the server beside their limit; each connection takes one.",
            (
                Query("sum by (instance) (process_open_fds{I})", "open {{instance}}"),
                Query("min(process_max_fds{I})", "limit"),
            ),
        ),
        Panel(
            "GPU use",
            "Share of time in which a kernel ran. Low beside a queue: see the runbook, OctavoAcceleratorIdle.",
            (Query("avg by (instance, device) (octavo_accelerator_utilization_ratio{I})", "{{instance}} {{device}}"),),
            "percentunit",
            needs="gpu",
        ),
        Panel(
            "GPU memory",
            "In use by anybody, beside what there is. More than weights and KV together: another process is on "
            "this GPU.",
            (
                Query("sum by (device) (octavo_accelerator_memory_used_bytes{I})", "used {{device}}"),
                Query("sum by (device) (octavo_accelerator_memory_total_bytes{I})", "total {{device}}"),
            ),
            "bytes",
            needs="gpu",
        ),
    ),
)
ROWS: tuple[Row, ...] = (_USERS, _ENGINE, _MEMORY, _QUEUE, _ERRORS, _MACHINE)

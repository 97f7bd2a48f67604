BEGIN TRANSACTION;
CREATE TABLE choices (
            completion_id TEXT NOT NULL REFERENCES completions (id) ON DELETE CASCADE,
            choice INTEGER NOT NULL,
            text TEXT NOT NULL,
            token_ids TEXT NOT NULL,
            finish_reason TEXT NOT NULL,
            completion_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            queue_ms REAL NOT NULL,
            ttft_ms REAL NOT NULL,
            total_ms REAL NOT NULL,
            PRIMARY KEY (completion_id, choice)
        );
INSERT INTO "choices" VALUES('completions-1',1,'text','[1,2]','finish_reason',1,1,1.5,1.5,1.5);
CREATE TABLE completions (
            id TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            object TEXT NOT NULL CHECK (object IN ('chat.completion', 'text_completion')),
            user TEXT,
            adapter TEXT,
            version INTEGER NOT NULL,
            model TEXT NOT NULL,
            messages TEXT,
            prompt TEXT,
            prompt_key TEXT NOT NULL,
            prompt_ids TEXT NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            choice_count INTEGER NOT NULL
        );
INSERT INTO "completions" VALUES('completions-1','2025-01-31T12:00:00.000000+00:00','chat.completion','ada','ada',1,'model','[{"role":"user","content":"Grüße 🙂"}]','prompt','prompt_key','[1,2]',1,1);
CREATE TABLE migrations (name TEXT PRIMARY KEY, applied_at TEXT NOT NULL);
INSERT INTO "migrations" VALUES('m001_completions','2026-11-22T03:45:51.805216+00:00');
INSERT INTO "migrations" VALUES('m002_feedback','2026-11-22T03:45:51.805513+00:00');
CREATE TABLE pairs (
            id INTEGER PRIMARY KEY,
            created_at TEXT NOT NULL,
            adapter TEXT NOT NULL,
            signal_id TEXT NOT NULL REFERENCES signals (id),
            source TEXT NOT NULL,
            weight REAL NOT NULL,
            messages TEXT,
            prompt TEXT,
            prompt_key TEXT NOT NULL,
            chosen TEXT NOT NULL,
            rejected TEXT NOT NULL,
            prompt_ids TEXT,
            chosen_ids TEXT,
            rejected_ids TEXT,
            chosen_completion_id TEXT REFERENCES completions (id),
            chosen_choice INTEGER,
            rejected_completion_id TEXT REFERENCES completions (id),
            rejected_choice INTEGER,
            state TEXT NOT NULL CHECK (state IN ('queued', 'held_out', 'trained', 'learnt', 'skipped')),
            epochs_done INTEGER NOT NULL DEFAULT 0,
            trained_version INTEGER,
            ref_chosen_logp REAL,
            ref_rejected_logp REAL,
            ref_model TEXT,
            note TEXT NOT NULL DEFAULT ''
        );
INSERT INTO "pairs" VALUES(1,'2025-01-31T12:00:00.000000+00:00','ada','signals-1','pair',1.5,'[{"role":"user","content":"Grüße 🙂"}]','prompt','prompt_key','chosen','rejected','[1,2]','[1,2]','[1,2]','completions-1',1,'completions-1',1,'trained',1,1,1.5,1.5,'base-b','note');
CREATE TABLE signals (
            id TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            completion_id TEXT REFERENCES completions (id),
            choice INTEGER,
            user TEXT NOT NULL,
            signal TEXT NOT NULL,
            text TEXT,
            seconds REAL,
            pair_ids TEXT NOT NULL,
            reason TEXT NOT NULL
        );
INSERT INTO "signals" VALUES('signals-1','2025-01-31T12:00:00.000000+00:00','completions-1',1,'ada','signal','text',1.5,'[1,2]','reason');
CREATE INDEX completions_by_prompt ON completions (prompt_key);
CREATE INDEX signals_by_completion ON signals (completion_id, choice);
CREATE INDEX pairs_by_adapter ON pairs (adapter, state);
CREATE INDEX pairs_by_signal ON pairs (signal_id);
CREATE INDEX pairs_by_prompt ON pairs (prompt_key);
CREATE INDEX pairs_by_chosen ON pairs (chosen_completion_id);
CREATE INDEX pairs_by_rejected ON pairs (rejected_completion_id);
COMMIT;

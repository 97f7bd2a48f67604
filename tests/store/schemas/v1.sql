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
INSERT INTO "migrations" VALUES('m001_completions','2026-11-22T03:45:51.801764+00:00');
CREATE INDEX completions_by_prompt ON completions (prompt_key);
COMMIT;

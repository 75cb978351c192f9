-- KEYS: STREAM
-- Returns nothing if there is no stream, else {attempt, tokens, type of the last entry, its data}.
local last, attempt, tokens = tail(STREAM)
if not last then return false end
return {attempt, tokens, field(last, 'type'), field(last, 'data')}

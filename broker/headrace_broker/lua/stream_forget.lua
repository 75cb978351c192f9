-- Deletes the keys of a request's run, so that the request can start over.
-- KEYS: STREAM, ENDED, RESULT, ENGINE_LOSSES, LISTENER
-- ARGV: content
-- content: the digest of the message's content. Returns 1, or 0 if the stream belongs to another message, or has no end:
-- another operator may have requeued the letter, and its request runs.
if redis.call('TYPE', STREAM).ok == 'stream' then
  local last = last_entry(STREAM, '+')
  if last and (field(last, 'type') ~= 'end' or is_of_another(STREAM, content)) then return 0 end
end
redis.call('DEL', STREAM, ENDED, RESULT, ENGINE_LOSSES, LISTENER)
return 1

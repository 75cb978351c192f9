-- KEYS: the batch, a hash; who holds which item of work, a hash.
-- ARGV: id, token of the claim, statuses in which it may be written, between commas; fields and values.
-- Returns '' where it was written, 'lost' where another holds the batch or it is gone, else its status.
local status = redis.call('HGET', KEYS[1], 'status')
if not status or redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then
  return 'lost'
end
if not string.find(',' .. ARGV[3] .. ',', ',' .. status .. ',', 1, true) then
  return status
end
for i = 4, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
return ''
